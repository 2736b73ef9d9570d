"""Stability-Weighted Decoding: what still moves waits."""

from __future__ import annotations

import numpy as np

from ..core.canvas import Canvas, FloatArray
from ..core.capabilities import ENTROPY, FRESH_LOGITS, PROBABILITY, Capability
from ..core.limits import NOT_NEGATIVE, bounds, one_of
from .base import Prediction, Scorer
from .compose import register
from .scorers import SCORES


@register(
    "stability",
    paper="Stability-Weighted Decoding for Diffusion Language Models",
    arxiv="2604.17068",
)
class Stability(Scorer):
    """A score minus ``weight`` (1) times how far the position's distribution has moved.

    The distance is KL(now || step before) in nats, 0 where a position was not predicted in the
    step before; the score is ``of``: "prob" (default), "neg_entropy" or "margin".  Changes the
    order of commits, and what a threshold lets through, of any selector.  Costs memory: one
    float32 distribution over the vocabulary per undecided position of the window.
    """

    needs = frozenset({FRESH_LOGITS})
    limits = bounds(weight=NOT_NEGATIVE, of=one_of(SCORES))

    weight: float = 1.0
    of: str = "prob"

    @property
    def statistics(self) -> frozenset[str]:  # type: ignore[override]
        return SCORES[self.of].statistics | {"kl"}

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        return SCORES[self.of].offers & {PROBABILITY, ENTROPY}  # depends on steps before

    @property
    def tau_low(self) -> float:  # type: ignore[override]
        return SCORES[self.of].tau_low

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        score, moved = SCORES[self.of].score(canvas, prediction), prediction.kl
        assert moved is not None, "asked for by name"
        return np.where(np.isfinite(moved), score - self.weight * moved, score).astype(np.float32)
