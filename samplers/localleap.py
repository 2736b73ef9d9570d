"""LocalLeap: certainty spreads to the neighbours of what is already certain."""

from typing import ClassVar

import numpy as np

from ..core.canvas import BoolArray
from ..core.capabilities import PROBABILITY, REPEATABLE
from ..core.errors import ConfigError
from ..core.limits import NOT_NEGATIVE, THRESHOLD, bounds
from ..core.spec import FamilyDefaults
from .base import Selector, View
from .compose import register


@register(
    "localleap",
    paper="Accelerating Diffusion LLM Inference via Local Determinism Propagation",
    arxiv="2510.07081",
)
class LocalLeap(Selector):
    """Commit what reaches ``kappa``, and near such anchors already what reaches ``tau_r``.

    Anchors are undecided positions with probability >= ``kappa`` (0.9); within ``w`` (4) positions
    of one, counted in the sequence, the threshold is ``tau_r`` (LLaDA 0.75, Dream 0.8).  Relaxed
    commits make no new anchors, and neither do decided positions: everything is recomputed each
    step.  The official ``early_stop`` is ``eos_policy="block_contains"``.
    """

    needs = frozenset({PROBABILITY})
    offers = frozenset({REPEATABLE})

    family_defaults: ClassVar[FamilyDefaults] = {"llada": {"tau_r": 0.75}, "dream": {"tau_r": 0.8}}
    limits = bounds(kappa=THRESHOLD, tau_r=THRESHOLD, w=NOT_NEGATIVE)

    kappa: float = 0.9
    tau_r: float | None = None
    w: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau_r is not None and self.tau_r > self.kappa:
            raise ConfigError(f"tau_r={self.tau_r} must not exceed kappa={self.kappa}")

    def select(self, view: View) -> BoolArray:
        assert self.tau_r is not None
        at, score = view.positions, view.score
        anchors = at[score >= self.kappa]
        if not anchors.size:
            return np.zeros(len(at), np.bool_)
        after = np.searchsorted(anchors, at)
        left = at - anchors[np.maximum(after - 1, 0)]
        right = anchors[np.minimum(after, len(anchors) - 1)] - at
        near = (np.abs(left) <= self.w) | (np.abs(right) <= self.w)
        return score >= np.where(near, self.tau_r, self.kappa)
