"""Draft lengths that need no measurement."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import Budget, Feedback, RoundStats
from .control import LengthController, at_least, register


@register("fixed")
@dataclass
class Fixed(LengthController):
    """Always ``k`` tokens."""

    k: int = 8

    def __post_init__(self) -> None:
        at_least(0, k=self.k)

    def next(self, room: int, context: int) -> Budget:
        return Budget(min(self.k, room), room)


@register("whole")
@dataclass
class Whole(LengthController):
    """As many tokens as the drafter proposes: lookup drafters know best."""

    def next(self, room: int, context: int) -> Budget:
        return Budget(room, room)


@register("heuristic")
@dataclass
class Heuristic(LengthController):
    """Two more after a draft that was accepted whole, else one fewer (transformers' schedule)."""

    start: int = 8
    k_max: int = 64

    def __post_init__(self) -> None:
        at_least(1, start=self.start, k_max=self.k_max)
        self._k = self.start

    def next(self, room: int, context: int) -> Budget:
        return Budget(min(self._k, room), room)

    def update(self, stats: RoundStats, feedback: Feedback) -> None:
        if stats.drafted:
            whole = stats.accepted == stats.depth
            self._k = min(self._k + 2, self.k_max) if whole else max(1, self._k - 1)
