"""Fast-dLLM's parallel decoding: commit whatever is confident enough."""

from ..core.canvas import BoolArray
from ..core.capabilities import PROBABILITY, REPEATABLE
from ..core.limits import COUNT, THRESHOLD, bounds
from .base import Selector, View, top
from .compose import register

FAST_DLLM = "Fast-dLLM: Training-free Acceleration of Diffusion LLM"


@register("threshold", paper=FAST_DLLM, arxiv="2505.22618")
class Threshold(Selector):
    """Commit every position whose probability reaches ``tau``, and always the ``n`` best ones.

    ``tau`` in [0, 1], default 0.9; 0 commits the whole block in one step, ``inf`` ``n`` tokens
    (default 1) per step.
    """

    needs = frozenset({PROBABILITY})
    offers = frozenset({REPEATABLE})
    limits = bounds(tau=THRESHOLD, n=COUNT)

    tau: float = 0.9
    n: int = 1

    def select(self, view: View) -> BoolArray:
        sure: BoolArray = view.score >= self.tau
        return sure | top(view.score, self.n) if self.n > 1 else sure  # one is guaranteed anyway
