"""The Dream baseline: a continuous-time schedule over the whole region."""

from dataclasses import dataclass

import numpy as np

from ..core.canvas import SCHEDULE, SELECTION, BoolArray, Canvas
from ..core.capabilities import FIXED_LENGTH, FIXED_WINDOW, FORESIGHT
from ..core.limits import COUNT, NOT_NEGATIVE, bounds, limit, one_of
from .base import Part, Selector, View, top
from .compose import register
from .llada import block_steps
from .scorers import Margin, NegEntropy, Probability, Random
from .windows import WholeRegion

ALGORITHMS = {
    "origin": Random, "maskgit_plus": Probability, "topk_margin": Margin, "entropy": NegEntropy
}  # fmt: skip


@dataclass
class Schedule:
    """How many steps fall to the current window."""

    steps: int = 1


def transfer_rate(steps: int, eps: float, step: int) -> np.float32:
    """Share of the undecided that a ``step`` reveals: 1 - t[step+1] / t[step], in float32.

    t falls linearly from 1 to ``eps``.  It is filled from both ends with one rounding to float32
    per value (a fused multiply-add), as the official schedule is: the truncated counts depend on
    its last bits.
    """
    slope = np.float64(np.float32((np.float32(eps) - np.float32(1)) / np.float32(steps)))

    def t(index: int) -> np.float32:
        if index < (steps + 1) // 2:
            return np.float32(1 + slope * index)
        return np.float32(np.float64(np.float32(eps)) - slope * (steps - index))

    return np.float32(1) - t(step + 1) / t(step)


@register("dream", paper="Dream 7B", arxiv="2508.15487")
class Dream(Selector):
    """Reveal the share of the undecided positions that a linear time schedule asks for.

    ``steps`` (default: one per position), ``eps`` the end of the schedule.  ``alg``: "entropy"
    (as in the published evaluations), "maskgit_plus", "topk_margin", or "origin", which reveals
    positions at random.  ``alg_temp`` > 0 draws positions with probability softmax(score /
    alg_temp) instead of taking the best.  Counts are truncated, so a step may reveal nothing (it
    then needs no forward) and the last one takes the rest.
    """

    needs = frozenset({FIXED_WINDOW, FIXED_LENGTH})
    offers = frozenset({FORESIGHT})  # what it looks at is the score
    scheduled = True
    limits = bounds(
        steps=COUNT, eps=limit(lambda x: 0 <= x < 1, "{name} must lie in [0, 1), not {value}"),
        alg=one_of(ALGORITHMS), alg_temp=NOT_NEGATIVE,
    )  # fmt: skip

    steps: int | None = None
    eps: float = 1e-3
    alg: str = "entropy"
    alg_temp: float = 0.0

    def companions(self, family: str) -> tuple[Part, ...]:
        return (WholeRegion(), ALGORITHMS[self.alg]())

    def begin_block(self, canvas: Canvas) -> None:
        canvas.state(Schedule).steps = block_steps(canvas, self.steps)

    def _rate(self, canvas: Canvas) -> float:
        """Share to reveal in this step; 1 in the last step of the window."""
        steps = canvas.state(Schedule).steps
        if canvas.block_step >= steps - 1:
            return 1.0
        return float(transfer_rate(steps, self.eps, canvas.block_step))

    def _drawn(self, canvas: Canvas) -> BoolArray:
        """origin: positions that reveal themselves in this step, independent of any prediction."""
        return canvas.uniform(SCHEDULE, canvas.masks()) < self._rate(canvas)

    def _count(self, canvas: Canvas) -> int:
        return int(np.float32(len(canvas.masks())) * np.float32(self._rate(canvas)))

    def rests(self, canvas: Canvas) -> bool:
        return not self._drawn(canvas).any() if self.alg == "origin" else self._count(canvas) == 0

    def select(self, view: View) -> BoolArray:
        if self.alg == "origin":
            return self._drawn(view.canvas)[np.isin(view.canvas.masks(), view.positions)]
        score = view.score
        if self.alg_temp > 0:  # Gumbel top-k is drawing without replacement
            noise = view.canvas.uniform(SELECTION, view.positions)
            score = score / np.float32(max(self.alg_temp, 1e-6)) - np.log(-np.log(noise))
        return top(score, self._count(view.canvas))
