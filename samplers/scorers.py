"""How sure the model is of a proposal.  Larger scores commit earlier.

Whether the numbers describe the clean distribution or the one after temperature and filters is a
fact of the model family (LLaDA: clean, Dream: tempered), not of the scorer.
"""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ..core.canvas import SELECTION, Canvas, FloatArray
from ..core.capabilities import ENTROPY, FORESIGHT, PROBABILITY, REPEATABLE
from .base import Prediction, Scorer
from .compose import register


@register("prob", paper="Large Language Diffusion Models", arxiv="2502.09992")
class Probability(Scorer):
    """The probability of the proposed token, in [0, 1]."""

    offers = frozenset({PROBABILITY, REPEATABLE})

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        return np.exp(prediction.logprob)


@register("margin", paper="Dream 7B", arxiv="2508.15487")
class Margin(Scorer):
    """The probability of the best token minus that of the second, in [0, 1]."""

    statistics: ClassVar = {"margin": 1}
    offers = frozenset({REPEATABLE})

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        assert prediction.margin is not None
        return prediction.margin


@register("neg_entropy", paper="Dream 7B", arxiv="2508.15487")
class NegEntropy(Scorer):
    """The negative entropy of the distribution, in nats, at most 0."""

    statistics: ClassVar = {"entropy": 1}
    offers = frozenset({ENTROPY, REPEATABLE})

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        assert prediction.entropy is not None
        return -prediction.entropy


# What other parts call the scores by.
SCORES: Mapping[str, Scorer] = {
    "prob": Probability(), "neg_entropy": NegEntropy(), "margin": Margin(),
}  # fmt: skip


@register("random", paper="Large Language Diffusion Models", arxiv="2502.09992")
class Random(Scorer):
    """Uniform noise per position and step: a random order of commits."""

    offers = frozenset({FORESIGHT})

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        return canvas.uniform(SELECTION, prediction.positions)
