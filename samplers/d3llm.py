"""d3LLM's multi-block decoding: later blocks open while earlier ones are being decided."""

from typing import ClassVar

import numpy as np

from ..core.canvas import BoolArray, IntArray
from ..core.capabilities import ENTROPY
from ..core.limits import NOT_NEGATIVE, bounds
from ..core.spec import FamilyDefaults
from .base import Part, Selector, View
from .compose import register
from .eos import Eos
from .scorers import NegEntropy
from .staged_blocks import MULTI_BLOCK, StagedBlocks, Stages


@register("d3llm", paper=MULTI_BLOCK, arxiv="2601.07568")
class D3LLM(Selector):
    """Commit what has an entropy of at most ``tau`` nats, and something in the first active block.

    Where nothing of the first active block reaches that, its most confident position is committed;
    with ``anywhere`` (the official code for LLaDA: True, for Dream: False) the best position of
    all is committed in any case.  ``tau`` 0.5.  Blocks open in stages (`StagedBlocks`), a stop id
    ends the region (``first_commit``).  Meant for d3LLM's distilled checkpoints: without their
    training, far blocks are decided before they can be.  Its cache is ``delayed``.
    """

    needs = frozenset({ENTROPY})
    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"anywhere": True},
        "dream": {"anywhere": False},
    }
    limits = bounds(tau=NOT_NEGATIVE)

    tau: float = 0.5
    anywhere: bool | None = None

    def companions(self, family: str) -> tuple[Part, ...]:
        return (StagedBlocks(), NegEntropy(), Eos("first_commit"))

    def select(self, view: View) -> BoolArray:
        chosen: BoolArray = view.score >= -self.tau
        if not len(chosen):
            return chosen
        if self.anywhere:
            chosen[view.score.argmax()] = True
        for block in view.canvas.state(Stages).live[:1]:
            decide_something(view, chosen, *block)
        return chosen


def decide_something(view: View, chosen: BoolArray, low: int, high: int) -> None:
    """Choose the best position of ``[low, high)`` where none of them is chosen yet."""
    here: IntArray = np.flatnonzero((view.positions >= low) & (view.positions < high))
    if here.size and not chosen[here].any():
        chosen[here[view.score[here].argmax()]] = True
