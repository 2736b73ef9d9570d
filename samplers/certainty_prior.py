"""d2Cache's certainty prior: probability times the density of decided positions."""

from __future__ import annotations

import numpy as np

from ..core.canvas import Canvas, FloatArray
from ..core.capabilities import PROBABILITY, REPEATABLE, Capability
from ..core.limits import POSITIVE, bounds
from ..core.shared import certainty_density
from .base import Part, Prediction, Scorer
from .compose import register
from .fixed import Fixed
from .llada import LLaDA


@register(
    "certainty_prior",
    paper="d2Cache: Accelerating Diffusion-Based LLMs via Dual Adaptive Caching",
    arxiv="2509.23094",
)
class CertaintyPrior(Scorer):
    """Probability times the Gaussian density of decided positions around.

    ``sigma`` (10) positions; as many positions as the region has count as decided on its left, and
    as many on its right if its last position is decided.  A small sigma decodes nearly from left to
    right.  It stays below the probability: a threshold compares what the density has left of it.
    """

    limits = bounds(sigma=POSITIVE)

    sigma: float = 10.0

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        return frozenset({PROBABILITY, REPEATABLE})  # of an object: errors advise plain `prob`

    def companions(self, family: str) -> tuple[Part, ...]:
        return (LLaDA(), Fixed())

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        density = certainty_density(canvas, self.sigma)
        near = density[prediction.positions - canvas.start]
        return (np.exp(prediction.logprob) * near).astype(np.float32)
