"""Fast-dLLM's parallel decoding: commit whatever is confident enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ..canvas import BoolArray, Canvas, IntArray
from ..capabilities import FIXED_WINDOW, PROBABILITY, REPEATABLE
from ..errors import ConfigError
from .base import NOTHING, Part, Selector, View, even_quota, top
from .compose import register
from .llada import block_steps
from .windows import WholeRegion

FAST_DLLM = "Fast-dLLM: Training-free Acceleration of Diffusion LLM"


def check_probability(name: str, value: float) -> None:
    """A probability threshold lies in [0, 1]; infinity means one token per step."""
    if not (0 <= value <= 1 or value == math.inf):
        raise ConfigError(
            f"{name}={value} is outside [0, 1]; use {name}=inf for one token per step"
        )


@register("threshold", paper=FAST_DLLM, arxiv="2505.22618")
@dataclass(frozen=True)
class Threshold(Selector):
    """Commit every position whose probability reaches ``tau``, and always the best one.

    ``tau`` in [0, 1], default 0.9; 0 commits the whole block in one step, ``inf`` one token per
    step.
    """

    needs = frozenset({PROBABILITY})
    offers = frozenset({REPEATABLE})

    tau: float = 0.9

    def __post_init__(self) -> None:
        check_probability("tau", self.tau)

    def select(self, view: View) -> BoolArray:
        return view.score >= self.tau


@register("factor", paper=FAST_DLLM, arxiv="2505.22618")
@dataclass(frozen=True)
class Factor(Selector):
    """Commit the n best, n the largest with (n + 1)(1 - p_(n)) <= ``factor``; always the best one.

    ``factor`` > 0, default 1.  ``official`` reproduces the released code, which also commits the
    last-ranked position when it alone fails its bound.
    """

    needs = frozenset({PROBABILITY})
    offers = frozenset({REPEATABLE})

    factor: float = 1.0
    official: bool = False

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise ConfigError(f"factor must be positive, not {self.factor}")

    def select(self, view: View) -> BoolArray:
        ranked = np.sort(view.score)[::-1]
        rank = np.arange(1, len(ranked) + 1)
        passed = ranked >= 1 - self.factor / (rank + 1)
        passed[:1] = True
        n = len(passed) if passed.all() else int(passed.argmin())
        if self.official and n == len(ranked) - 1:
            n += 1
        return top(view.score, n)


@dataclass
class Deferred:
    """The schedule of a block, (steps,) counts, and how many scheduled positions wait."""

    table: IntArray = field(default_factory=lambda: NOTHING)
    carry: int = 0


@register("capped_threshold", paper=FAST_DLLM, arxiv="2505.22618")
@dataclass(frozen=True)
class CappedThreshold(Selector):
    """A quota that defers: of the scheduled positions, those below ``tau`` wait for a later step.

    Fast-dLLM's uncached rule for Dream, over the whole region.  Each step schedules an even share
    of the positions plus those deferred so far; the best is always committed, the others when
    their probability reaches ``tau``.  ``steps``: total number of steps, shared out over the blocks
    if there are any (default: one per position).
    """

    needs = frozenset({PROBABILITY, FIXED_WINDOW})
    scheduled = True

    tau: float = 0.9
    steps: int | None = None

    def __post_init__(self) -> None:
        check_probability("tau", self.tau)
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps must be at least 1, not {self.steps}")

    def companions(self) -> tuple[Part, ...]:
        return (WholeRegion(),)

    def begin_block(self, canvas: Canvas) -> None:
        state = canvas.state(Deferred)
        state.table = even_quota(len(canvas.masks()), block_steps(canvas, self.steps))
        state.carry = 0

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
