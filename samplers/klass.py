"""KLASS: confident and no longer moving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..core.canvas import SELECTION, BoolArray, Canvas, FloatArray
from ..core.capabilities import FIXED_LENGTH, FRESH_LOGITS, PROBABILITY
from ..core.limits import COUNT, NOT_NEGATIVE, POSITIVE, THRESHOLD, bounds, one_of
from ..core.spec import FamilyDefaults
from .base import NO_SCORES, Part, Selector, View, top
from .compose import register
from .llada import Quota, schedule
from .windows import StaticBlocks, WholeRegion

STRATEGIES = ("all", "max_conf", "min_kl", "random")


@dataclass
class Divergences(Quota):
    """The schedule where none is ready; (N, history) latest divergences, none yet at first."""

    ring: FloatArray = field(default_factory=lambda: NO_SCORES)


@register(
    "klass", paper="KLASS: KL-Guided Fast Inference in Masked Diffusion Models", arxiv="2511.05664"
)
class KLASS(Selector):
    """Commit confident positions whose distribution has been stable over the last steps.

    Ready is what exceeds ``tau`` while the last ``history`` (2) divergences KL(now || step before)
    lie below ``kappa`` nats; ``unmask_strategy`` "all" commits everything ready, "max_conf",
    "min_kl" and "random" one of it.  Where nothing is ready, the most confident positions are
    committed, as many as an even schedule of ``steps`` grants (default: one).  Defaults are those
    for GSM8K: LLaDA ``tau`` 0.6, ``kappa`` 0.015 in blocks of 64; Dream 0.9, which need only be
    reached (``inclusive``), and 0.001, without blocks.  Divergences exist only for positions
    predicted in consecutive steps; a gap starts their history anew.  Only the window is followed,
    which caches of a block can serve.  ``top_k`` ranks, where nothing is ready, by probabilities
    among so many tokens, as the released code for Dream does by transformers' default of 50.  Costs
    memory: one float32 distribution over the vocabulary per position that is followed.
    """

    needs = frozenset({PROBABILITY, FRESH_LOGITS, FIXED_LENGTH})
    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"tau": 0.6, "kappa": 0.015, "inclusive": False},
        "dream": {"tau": 0.9, "kappa": 0.001, "inclusive": True},
    }
    limits = bounds(
        tau=THRESHOLD, kappa=POSITIVE, history=COUNT, steps=COUNT, top_k=NOT_NEGATIVE,
        unmask_strategy=one_of(STRATEGIES)
    )  # fmt: skip

    tau: float | None = None
    kappa: float | None = None
    history: int = 2
    unmask_strategy: str = "all"
    inclusive: bool | None = None
    steps: int | None = None
    top_k: int = 0

    @property
    def statistics(self) -> Mapping[str, int]:  # type: ignore[override]
        return {"kl": 1, "top_logprob": self.top_k} if self.top_k else {"kl": 1}

    def companions(self, family: str) -> tuple[Part, ...]:
        whole = (WholeRegion(),) if family == "dream" else ()
        return (*whole, StaticBlocks(64))

    def begin_block(self, canvas: Canvas) -> None:
        schedule(canvas, self.steps, Divergences)

    def _recent(self, canvas: Canvas, view: View) -> FloatArray:
        """(n, history) latest divergences, this step's last."""
        state = canvas.state(Divergences)
        if not state.ring.size:
            state.ring = np.full((len(canvas.tokens), self.history), np.inf, np.float32)
        ring, seen = state.ring, view.prediction
        assert seen.kl is not None
        ring[seen.positions] = np.column_stack([ring[seen.positions][:, 1:], seen.kl])
        return ring[view.positions]

    def _filtered(self, view: View) -> FloatArray:
        """(n,) scores where nothing is ready."""
        likeliest = view.prediction.top_logprob
        if not self.top_k or likeliest is None:
            return view.score
        mass = np.exp(likeliest[:, : self.top_k]).sum(1)
        result: FloatArray = (view.score / mass).astype(np.float32)
        return result

    def _quota(self, canvas: Canvas) -> int:
        """Positions to commit where none is ready; one, once the schedule has run out."""
        quota, step = canvas.state(Divergences).table, canvas.block_step
        return max(int(quota[step]), 1) if step < len(quota) else 1

    def select(self, view: View) -> BoolArray:
        assert self.tau is not None and self.kappa is not None
        recent = self._recent(view.canvas, view)
        sure = view.score >= self.tau if self.inclusive else view.score > self.tau
        ready: BoolArray = (recent < self.kappa).all(1) & sure
        if not ready.any():
            return top(self._filtered(view), self._quota(view.canvas))
        if self.unmask_strategy == "all":
            return ready
        if self.unmask_strategy == "random":
            rank = view.canvas.uniform(SELECTION, view.positions)
        else:
            rank = view.score if self.unmask_strategy == "max_conf" else -recent[:, -1]
        return top(np.where(ready, rank, -np.inf).astype(np.float32), 1)
