"""dParallel's decoding rule: a threshold on entropy."""

from typing import ClassVar

from ..core.canvas import BoolArray
from ..core.capabilities import ENTROPY, REPEATABLE
from ..core.limits import NOT_NEGATIVE, bounds
from ..core.spec import FamilyDefaults
from .base import Part, Selector, View
from .compose import register
from .scorers import NegEntropy


@register("dparallel", paper="dParallel: Learnable Parallel Decoding for dLLMs", arxiv="2509.26488")
class EntropyThreshold(Selector):
    """Commit every position whose entropy is at most ``tau`` nats, and always the best one.

    ``tau`` defaults to 0.5 (the paper uses 0.45 for LLaDA on MBPP and for Dream on GSM8K and
    MATH).  On Dream the entropy has to lie below ``tau``, elsewhere it may equal it
    (``inclusive``), as in the official code.  The published speed needs dParallel checkpoints.
    """

    needs = frozenset({ENTROPY})
    offers = frozenset({REPEATABLE})

    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"inclusive": True},
        "dream": {"inclusive": False},
    }
    limits = bounds(tau=NOT_NEGATIVE)

    tau: float = 0.5
    inclusive: bool | None = None

    def companions(self, family: str) -> tuple[Part, ...]:
        return (NegEntropy(),)

    def select(self, view: View) -> BoolArray:
        return view.score >= -self.tau if self.inclusive else view.score > -self.tau
