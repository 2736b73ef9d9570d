"""EB-Sampler: bound the joint uncertainty of what a step commits."""

from typing import ClassVar

import numpy as np

from ..core.canvas import BoolArray
from ..core.capabilities import REPEATABLE
from ..core.limits import NOT_NEGATIVE, bounds, one_of
from .base import Part, Scorer, Selector, View
from .compose import register
from .scorers import Margin, NegEntropy, Probability

PROXIES: dict[str, type[Scorer]] = {"prob": Probability, "entropy": NegEntropy, "margin": Margin}


@register(
    "eb",
    paper="Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking",
    arxiv="2505.24857",
)
class EntropyBounded(Selector):
    """Commit the n best positions whose entropies, the largest aside, sum to at most ``gamma``.

    ``gamma`` in nats (default 0.1, chosen for this library; the paper's values differ by model);
    0 commits one position plus any without entropy.  ``proxy`` brings the score that orders
    positions: "prob" (default), "entropy" or "margin".
    """

    offers = frozenset({REPEATABLE})
    statistics: ClassVar = {"entropy": 1}
    limits = bounds(gamma=NOT_NEGATIVE, proxy=one_of(PROXIES))

    gamma: float = 0.1
    proxy: str = "prob"

    def companions(self, family: str) -> tuple[Part, ...]:
        return (PROXIES[self.proxy](),)

    def select(self, view: View) -> BoolArray:
        entropy = view.prediction.entropy
        assert entropy is not None
        order = (-view.score).argsort(kind="stable")
        ranked = entropy[order].astype(np.float64)
        joint = ranked.cumsum() - np.maximum.accumulate(ranked)
        chosen: BoolArray = np.zeros(len(order), np.bool_)
        chosen[order[: np.count_nonzero(joint <= self.gamma)]] = True
        return chosen
