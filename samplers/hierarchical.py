"""dInfer's hierarchical decoding: one commit per gap, so that commits do not touch."""

import numpy as np

from ..core.canvas import BoolArray
from ..core.capabilities import PROBABILITY, REPEATABLE
from ..core.errors import ConfigError
from ..core.limits import THRESHOLD, bounds
from .base import Selector, View
from .compose import register


@register(
    "hierarchical",
    paper="dInfer: An Efficient Inference Framework for Diffusion Language Models",
    arxiv="2510.08666",
)
class Hierarchical(Selector):
    """Commit what is sure, and in every run of undecided positions its best.

    Sure is what exceeds ``threshold`` (0.9); the best of a run has to exceed ``low_threshold``
    (0.4).  Both are exceeded strictly; ties within a run go to the lowest position.  Large blocks
    suit it: commits spread out instead of lying side by side.
    """

    needs = frozenset({PROBABILITY})
    offers = frozenset({REPEATABLE})
    limits = bounds(threshold=THRESHOLD, low_threshold=THRESHOLD)

    threshold: float = 0.9
    low_threshold: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_threshold > self.threshold:
            raise ConfigError(
                f"low_threshold={self.low_threshold} must not exceed threshold={self.threshold}"
            )

    def select(self, view: View) -> BoolArray:
        score, count = view.score, len(view.positions)
        if not count:
            return np.zeros(0, np.bool_)
        starts = np.flatnonzero(np.diff(view.positions, prepend=-2) > 1)
        run = np.repeat(np.arange(len(starts)), np.diff(starts, append=count))
        best = np.maximum.reduceat(score, starts)
        places = np.where(score == best[run], np.arange(count), count)
        first = np.minimum.reduceat(places, starts)
        chosen: BoolArray = score > self.threshold
        chosen[first[best > self.low_threshold]] = True
        return chosen
