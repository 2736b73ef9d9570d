"""Draft as long as the drafter is sure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..base import Array, Budget
from .control import ALL, LengthController, at_least, register


@register("confidence")
@dataclass
class Confidence(LengthController):
    """As far as the drafter's probabilities stay at or above ``tau``, at most ``k_max`` tokens."""

    tau: float = 0.5
    k_max: int = 32

    def next(self, room: int, context: int) -> Budget:
        return Budget(min(self.k_max, room), room, self._refine)

    def _refine(self, confidence: Array) -> int:
        low = np.flatnonzero(confidence[: self.k_max] < self.tau)
        return int(low[0]) if low.size else min(self.k_max, len(confidence))


@register("confidence_extend", paper="Fail Fast, or Win Big: Rethinking the Drafting Strategy in "
          "Speculative Decoding via Diffusion LLMs", arxiv="2512.20573")  # fmt: skip
@dataclass
class ConfidenceExtend(LengthController):
    """FailFast: extend by ``n`` tokens while no token of the draft is below ``tau``.

    The piece with the first improbable token is still sent.  The official code drafts anew for
    every piece, with what it has so far as context; here one forward gives all pieces.
    """

    n: int = 10
    tau: float = 0.45
    k_max: int = 60

    def __post_init__(self) -> None:
        at_least(1, n=self.n, k_max=self.k_max)

    def next(self, room: int, context: int) -> Budget:
        return Budget(min(self.k_max, room), room, self._refine)

    def _refine(self, confidence: Array) -> int:
        low = np.flatnonzero(confidence < self.tau)
        sure = int(low[0]) if low.size else ALL
        return min(self.n * (sure // self.n + 1), self.k_max, len(confidence))
