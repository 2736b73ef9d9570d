"""Calibrated acceptance."""

import numpy as np

from ...core.canvas import IntArray
from ..base import Array

DEPTHS = (0, 1, 2, 4, 8, 16)  # lower ends of the depth buckets
CONFIDENCES = 10  # buckets of equal width


class Acceptance:
    """How often a drafted token is accepted, by depth, by the drafter's confidence, and by whether
    the draft before was accepted whole.

    A diffusion model's confidence is no probability of acceptance: the table learns the relation
    from verified positions only, i.e. those up to and including the first rejection.  Every cell
    starts from a Beta(1, 1) prior, centred on the confidence itself with the weight of ``prior``
    observations.  The last distinction is there because acceptance comes in runs (DEER, arXiv
    2512.15176, finds it bimodal).
    """

    def __init__(self, prior: float = 2.0) -> None:
        self.prior = prior
        shape = (2, len(DEPTHS), CONFIDENCES)
        self.accepted, self.judged = np.zeros(shape), np.zeros(shape)

    def __call__(
        self, confidence: Array, after_whole: bool = False, optimism: float = 0.0
    ) -> Array:
        """Probability that token i is accepted if all before it were, (w,); ``optimism`` adds so
        many standard errors, which has little-known lengths tried."""
        at = (int(after_whole), *self._cells(confidence))
        weight = self.judged[at] + self.prior
        share: Array = (self.accepted[at] + self.prior * confidence) / weight
        if optimism:
            share = np.minimum(share + optimism * np.sqrt(share * (1 - share) / weight), 0.999)
        return share

    def update(self, confidence: Array, accepted: int, after_whole: bool = False) -> None:
        """Learn from a chain of which ``accepted`` tokens were kept."""
        judged, state = min(accepted + 1, len(confidence)), int(after_whole)
        rows, columns = (index[:judged] for index in self._cells(confidence))
        np.add.at(self.judged[state], (rows, columns), 1)
        np.add.at(self.accepted[state], (rows[:accepted], columns[:accepted]), 1)

    def _cells(self, confidence: Array) -> tuple[IntArray, IntArray]:
        at = np.arange(len(confidence))
        depth = np.searchsorted(DEPTHS, at, side="right").astype(np.int64) - 1
        level = np.clip((confidence * CONFIDENCES).astype(np.int64), 0, CONFIDENCES - 1)
        return depth, level
