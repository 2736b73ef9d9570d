"""A threshold with a bound on the commits of a step."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.canvas import BoolArray, Canvas
from ..core.capabilities import FIXED_LENGTH, FIXED_WINDOW, PROBABILITY
from ..core.limits import COUNT, THRESHOLD, bounds
from .base import Part, Selector, View, top
from .compose import register
from .llada import Quota, schedule
from .threshold import FAST_DLLM
from .windows import WholeRegion


@dataclass
class Deferred(Quota):
    """A schedule, and how many scheduled positions wait."""

    carry: int = 0


@register("capped_threshold", paper=FAST_DLLM, arxiv="2505.22618")
class CappedThreshold(Selector):
    """A quota that defers: of the scheduled positions, those below ``tau`` wait for a later step.

    Fast-dLLM's uncached rule for Dream, over the whole region.  Each step schedules an even share
    of the positions plus those deferred so far; the best is always committed, the others when
    their probability reaches ``tau``.  ``steps``: total number of steps, shared out over the blocks
    if there are any (default: one per position).
    """

    needs = frozenset({PROBABILITY, FIXED_WINDOW, FIXED_LENGTH})
    scheduled = True
    limits = bounds(tau=THRESHOLD, steps=COUNT)

    tau: float = 0.9
    steps: int | None = None

    def companions(self, family: str) -> tuple[Part, ...]:
        return (WholeRegion(),)

    def begin_block(self, canvas: Canvas) -> None:
        schedule(canvas, self.steps, Deferred)
        canvas.state(Deferred).carry = 0

    def _scheduled(self, canvas: Canvas) -> int:
        state, step = canvas.state(Deferred), canvas.block_step
        due = int(state.table[step]) if step < len(state.table) else 0
        return min(due + state.carry, len(canvas.masks()))

    def rests(self, canvas: Canvas) -> bool:
        return self._scheduled(canvas) == 0

    def select(self, view: View) -> BoolArray:
        scheduled = self._scheduled(view.canvas)
        chosen: BoolArray = top(view.score, scheduled) & (view.score >= self.tau)
        if len(chosen):
            chosen[view.score.argmax()] = True
        view.canvas.state(Deferred).carry = scheduled - int(chosen.sum())
        return chosen
