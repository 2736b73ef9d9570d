"""Rules of released code that the library does not have, beside the traces that need them.

They are known by name to `parts` and `cache_of` alone: what is registered here is no sampler or
cache of the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dllm.cache import CACHES
from dllm.core.canvas import BoolArray, Canvas
from dllm.core.capabilities import REPEATABLE
from dllm.core.registry import Registry
from dllm.core.spec import parse
from dllm.samplers import SAMPLERS, Course, Part, Selector, Turn, View
from dllm.samplers.base import top
from dllm.samplers.llada import Quota, schedule
from dllm.samplers.windows import WholeRegion

T = TypeVar("T")


class Released(Registry[T]):
    """The names of a registry of the library, and those of released code."""

    def __init__(self, library: Registry[T]) -> None:
        super().__init__(library.kind)
        self.library = library

    def __getitem__(self, name: str) -> type[T]:
        return self._entries[name] if name in self._entries else self.library[name]


PARTS: Released[Part] = Released(SAMPLERS)
RELEASED_CACHES: Released[Any] = Released(CACHES)


def parts(spec: str) -> tuple[Part, ...]:
    """The parts that ``spec`` names, those of released code among them."""
    return parse(spec, PARTS)


def cache_of(spec: str) -> Any:
    """The cache that ``spec`` names, one of released code or of the library."""
    (cache,) = parse(spec, RELEASED_CACHES)
    return cache


@dataclass
class Deferred(Quota):
    """A schedule, and how many scheduled positions wait."""

    carry: int = 0


@PARTS.register("capped_threshold")
@dataclass(frozen=True)
class CappedThreshold(Selector):
    """Fast-dLLM's uncached rule for Dream: of the positions that a schedule of ``steps`` grants,
    the best is committed, and others that reach ``tau``; what is left waits for a later step."""

    scheduled = True

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


@PARTS.register("force_first")
@dataclass(frozen=True)
class ForceFirst(Course):
    """Cached code for Dream: exactly the first undecided position in the first step of a block,
    because nothing predicts it later; or in every ``every``-th step of the row."""

    offers = frozenset({REPEATABLE})

    every: int = 0

    def decide(self, turn: Turn) -> None:
        canvas = turn.canvas
        due = canvas.step % self.every == 0 if self.every else canvas.block_step == 0
        if due and not turn.stopped():
            turn.choose_these(np.arange(len(turn.view.positions)) == 0)


@PARTS.register("awake")
@dataclass(frozen=True)
class Awake(Selector):
    """Chooses nothing, and has a schedule take the steps in which `ForceFirst` does."""

    every: int = 1

    def rests(self, canvas: Canvas) -> bool:
        return canvas.step % self.every > 0

    def select(self, view: View) -> BoolArray:
        return np.zeros(len(view.positions), np.bool_)
