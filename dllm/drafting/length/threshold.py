"""Draft while a token is likely enough to be accepted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..base import Array, Budget
from .acceptance import Calibrated
from .control import CONTROLLERS, at_least


@CONTROLLERS.register("threshold", paper="SpecDec++: Boosting Speculative Decoding via Adaptive "
                      "Candidate Lengths", arxiv="2405.19715")  # fmt: skip
@dataclass
class Threshold(Calibrated):
    """Draft until the probability of at least one rejection exceeds ``h``.

    The token that crosses the bound is sent and one more, as in the official code, which tests one
    token late; ``h`` and the lengths, ``k_min`` to ``k_max``, are its defaults.  SpecDec++ trains a
    head to predict acceptance; here it is the calibrated confidence.
    """

    k_max: int = 20
    k_min: int = 2
    h: float = 0.3

    def __post_init__(self) -> None:
        at_least(0, k_min=self.k_min, k_max=self.k_max - self.k_min)
        super().__post_init__()

    def next(self, room: int, context: int) -> Budget:
        return Budget(min(self.k_max, room), room, self._refine)

    def _refine(self, confidence: Array) -> int:
        alive = np.cumprod(self.acceptance(confidence[: self.k_max], self._after_whole))
        sent = int((1 - alive <= self.h).sum()) + 2
        return max(self.k_min, min(sent, self.k_max))
