"""The drafter that accepted most of late drafts next."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ...canvas import IntArray
from ..base import (
    DRAFTERS,
    Budget,
    Draft,
    Drafting,
    DraftRequest,
    Feedback,
)
from .first_of import _FirstOf, _Several


class _Arbiter(_FirstOf):
    def __init__(self, part: Arbiter, request: DraftRequest) -> None:
        super().__init__(part, request)
        count = len(self.members)
        self.part, self.round, self.chosen = part, 0, 0
        self.tokens, self.seconds = [0.0] * count, [0.0] * count
        self.last_used = [-1] * count
        self.began: float | None = None  # None: this round asked no drafter

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        self.began = time.perf_counter()
        oldest = min(range(len(self.members)), key=lambda i: (self.last_used[i], i))
        if self.last_used[oldest] < 0 or self.round % self.part.explore == 0:
            self.chosen = oldest
        else:
            self.chosen = max(range(len(self.members)), key=self._rate)
        self.last_used[self.chosen] = self.round
        self.round += 1
        return self.members[self.chosen].propose(prefix, budget)

    def _rate(self, index: int) -> float:
        return self.tokens[index] / max(self.seconds[index], 1e-9)

    def observe(self, feedback: Feedback) -> None:
        rho, i = self.part.rho, self.chosen
        if self.began is not None:
            self.tokens[i] += rho * (len(feedback.emitted) - self.tokens[i])
            self.seconds[i] += rho * (time.perf_counter() - self.began - self.seconds[i])
        self.began = None
        super().observe(feedback)


@DRAFTERS.register("arbiter")
@dataclass
class Arbiter(_Several):
    """The drafter with the most tokens per second so far; now and then another one is tried.

    Tokens per second are those emitted by rounds of a drafter over their seconds, both smoothed by
    ``rho``; every ``explore``-th round goes to the drafter that was not used for longest.
    """

    rho: float = 0.2
    explore: int = 12

    timed = True

    def open(self, request: DraftRequest) -> Drafting:
        return _Arbiter(self, request)
