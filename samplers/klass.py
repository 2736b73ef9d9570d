"""KLASS: confident and no longer moving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..canvas import SELECTION, BoolArray, Canvas, FloatArray
from ..capabilities import FRESH_LOGITS, PROBABILITY
from ..errors import ConfigError, UnknownNameError
from ..spec import FamilyDefaults
from .base import NO_SCORES, Part, Selector, View, top
from .compose import register
from .threshold import check_probability
from .windows import StaticBlocks, WholeRegion

STRATEGIES = ("all", "max_conf", "min_kl", "random")


@dataclass
class Divergences:
    """(N, history) latest divergences of every position, or none yet."""

    ring: FloatArray = field(default_factory=lambda: NO_SCORES)


@register(
    "klass",
    paper="KLASS: KL-Guided Fast Inference in Masked Diffusion Models",
    arxiv="2511.05664",
)
@dataclass(frozen=True)
class KLASS(Selector):
    """Commit confident positions whose distribution has been stable over the last steps.

    Ready is what exceeds ``tau`` while the last ``history`` (2) divergences KL(now || step before)
    lie below ``kappa`` nats; ``unmask_strategy`` "all" commits everything ready, "max_conf",
    "min_kl" and "random" one of it.  Where nothing is ready the most confident position is
    committed.  Defaults are those for GSM8K: LLaDA ``tau`` 0.6, ``kappa`` 0.015 in blocks of 64;
    Dream 0.9, which need only be reached (``inclusive``), and 0.001, without blocks.  Divergences
    exist only for positions predicted in consecutive steps; a gap starts their history anew.  Costs
    memory: one float32 distribution over the vocabulary per undecided position of the window.
    """

    needs = frozenset({PROBABILITY, FRESH_LOGITS})
    statistics = frozenset({"kl"})
    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"tau": 0.6, "kappa": 0.015, "inclusive": False},
        "dream": {"tau": 0.9, "kappa": 0.001, "inclusive": True},
    }
    family_companions: ClassVar[Mapping[str, tuple[Part, ...]]] = {"dream": (WholeRegion(),)}

    tau: float | None = None
    kappa: float | None = None
    history: int = 2
    unmask_strategy: str = "all"
    inclusive: bool | None = None

    def __post_init__(self) -> None:
        if self.tau is not None:
            check_probability("tau", self.tau)
        if self.kappa is not None and not self.kappa > 0:
            raise ConfigError(f"kappa must be positive, not {self.kappa}: it is a divergence")
        if self.history < 1:
            raise ConfigError(f"history must be at least 1, not {self.history}")
        if self.unmask_strategy not in STRATEGIES:
            raise UnknownNameError("unmask_strategy", self.unmask_strategy, STRATEGIES)

    def companions(self) -> tuple[Part, ...]:
        return (StaticBlocks(64),)

    def _recent(self, canvas: Canvas, view: View) -> FloatArray:
        """(n, history) latest divergences, this step's last."""
        state = canvas.state(Divergences)
        if not state.ring.size:
            state.ring = np.full((len(canvas.tokens), self.history), np.inf, np.float32)
        ring, kl = state.ring, view.prediction.kl
        assert kl is not None
        ring[view.positions] = np.column_stack([ring[view.positions][:, 1:], kl])
        return ring[view.positions]

    def select(self, view: View) -> BoolArray:
        assert self.tau is not None and self.kappa is not None
        recent = self._recent(view.canvas, view)
        sure = view.score >= self.tau if self.inclusive else view.score > self.tau
        ready: BoolArray = (recent < self.kappa).all(1) & sure
        if self.unmask_strategy == "all" or not ready.any():
            return ready
        if self.unmask_strategy == "random":
            rank = view.canvas.uniform(SELECTION, view.positions)
        else:
            rank = view.score if self.unmask_strategy == "max_conf" else -recent[:, -1]
        return top(np.where(ready, rank, -np.inf).astype(np.float32), 1)
