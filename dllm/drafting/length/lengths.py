"""Draft lengths that need no measurement of time: fixed, or by acceptance."""

from dataclasses import dataclass

import numpy as np

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


@register("full")
@dataclass
class Full(LengthController):
    """As many tokens as the drafter proposes: prompt lookup knows best how many match."""

    def next(self, room: int, context: int) -> Budget:
        return Budget(room, room)


@register("adl", paper="DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding",
          arxiv="2510.02358")  # fmt: skip
@dataclass
class AdaptiveDraftLength(LengthController):
    """DiffuSpec's controller, as published: smoothed generation and acceptance lengths.

    With these constants a drafter that is not right all the time gets ``k_min`` tokens: growth asks
    for every drafted token to be accepted.  The floor to an integer is reconstructed.
    """

    k_min: int = 20
    k_max: int = 30
    delta: int = 10
    rho: float = 0.5

    def __post_init__(self) -> None:
        at_least(1, k_min=self.k_min)
        at_least(self.k_min, k_max=self.k_max)
        self._generated = self._accepted = 0.0
        self._k = self._granted = self.k_max

    def next(self, room: int, context: int) -> Budget:
        self._granted = min(self._k, room)
        return Budget(self._granted, room)

    def update(self, stats: RoundStats, feedback: Feedback) -> None:
        draft = feedback.draft
        if not len(draft):
            return
        # of the raw draft, before any search: to its first end of text, or all that was asked for
        self.step(self._granted if draft.end is None else min(draft.end, self._granted),
                  stats.accepted)  # fmt: skip

    def step(self, generated: float, accepted: float) -> None:
        """One update with the generation length and the acceptance length of a round."""
        self._generated += self.rho * (generated - self._generated)
        self._accepted += self.rho * (accepted - self._accepted)
        grown = self._generated + self.delta * (self._accepted >= self._generated)
        self._k = int(np.clip(grown, self.k_min, self.k_max))
