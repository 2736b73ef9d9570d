"""DiffuSpec's adaptive draft length."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..base import Budget, Feedback, RoundStats
from .control import LengthController, at_least, register


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
        at_least(1, k_min=self.k_min, k_max=self.k_max - self.k_min + 1)
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
        self._k = self._length()

    def _length(self) -> int:
        grown = self._generated + self.delta * (self._accepted >= self._generated)
        return int(np.clip(grown, self.k_min, self.k_max))


@register("adl_repaired")
@dataclass
class RepairedDraftLength(AdaptiveDraftLength):
    """`adl` with a target that a real drafter can reach (reconstructed).

    The length follows the smoothed acceptance, ``margin`` tokens ahead of it and never beyond the
    drafter's own end of text; a draft that was accepted whole doubles it, because acceptance is
    bimodal (DEER, arXiv 2512.15176, section on accepted lengths).
    """

    k_min: int = 2
    margin: int = 3

    def update(self, stats: RoundStats, feedback: Feedback) -> None:
        super().update(stats, feedback)
        if stats.depth and stats.accepted == stats.depth:
            self._k = min(2 * stats.depth, self.k_max)

    def _length(self) -> int:
        ahead = min(self._accepted + self.margin, max(self._generated + 1, self.k_min))
        return int(np.clip(round(ahead), self.k_min, self.k_max))
