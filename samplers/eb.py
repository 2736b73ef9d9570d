"""EB-Sampler: bound the joint uncertainty of what a step commits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..canvas import BoolArray
from ..capabilities import MEMORYLESS
from ..errors import ConfigError, UnknownNameError
from .base import Selector, View, top
from .compose import register


@register(
    "eb",
    paper="Accelerated Sampling from Masked Diffusion Models via Entropy Bounded Unmasking",
    arxiv="2505.24857",
)
@dataclass(frozen=True)
class EntropyBounded(Selector):
    """Commit the n surest positions whose entropies, the largest aside, sum to at most ``gamma``.

    ``gamma`` in nats (default 0.1, chosen for this library; the paper's values differ by model);
    0 commits one position plus any without entropy.  ``proxy`` orders positions: "prob"
    (default), "entropy" or "margin".  The rule follows the paper; no official code was available.
    """

    offers = frozenset({MEMORYLESS})
    statistics = frozenset({"entropy", "margin"})

    gamma: float = 0.1
    proxy: str = "prob"

    def __post_init__(self) -> None:
        if not self.gamma >= 0:
            raise ConfigError(f"gamma must not be negative, not {self.gamma}")
        if self.proxy not in ("prob", "entropy", "margin"):
            raise UnknownNameError("proxy", self.proxy, ("prob", "entropy", "margin"))

    def select(self, view: View) -> BoolArray:
        p = view.prediction
        assert p.entropy is not None and p.margin is not None
        certainty = {"prob": p.logprob, "entropy": -p.entropy, "margin": p.margin}[self.proxy]
        order = np.argsort(-certainty, kind="stable")
        entropy = p.entropy[order].astype(np.float64)
        joint = np.cumsum(entropy) - np.maximum.accumulate(entropy)
        return top(certainty, int((joint <= self.gamma).sum()))
