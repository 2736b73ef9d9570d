"""A quirk of cached Dream code: the first position of a block is committed when it opens, because
nothing predicts it later."""

from __future__ import annotations

import numpy as np

from dllm.core.canvas import BoolArray, Canvas
from dllm.core.capabilities import REPEATABLE
from dllm.samplers import Course, Selector, Turn, View, register


@register("force_first")
class ForceFirst(Course):
    """Exactly the first undecided position in the first step of a block, or in every ``every``-th
    step of the row, from the first one on."""

    offers = frozenset({REPEATABLE})

    every: int = 0

    def decide(self, turn: Turn) -> None:
        canvas = turn.canvas
        due = canvas.step % self.every == 0 if self.every else canvas.block_step == 0
        if due and not turn.stopped():
            turn.choose_these(np.arange(len(turn.view.positions)) == 0)


@register("awake")
class Awake(Selector):
    """Chooses nothing, and has a schedule take the steps in which `ForceFirst` does."""

    every: int = 1

    def rests(self, canvas: Canvas) -> bool:
        return canvas.step % self.every > 0

    def select(self, view: View) -> BoolArray:
        return np.zeros(len(view.positions), np.bool_)
