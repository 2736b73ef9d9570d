"""SureLock: a decided position whose prediction has come to rest is not computed any more."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ..core.canvas import BoolArray, Canvas, FloatArray, IntArray
from ..core.capabilities import OWN_PREDICTIONS
from ..core.limits import NOT_NEGATIVE, bounds
from .base import REGION, Plan, Slots, full_plan, register
from .refresh import Refreshing

STEADY = 2  # steps of the same token that a divergence compares


@dataclass(slots=True)
class Locked:
    """(N,) whether a row is ``locked``, and in how many steps it was computed ``since`` its token
    last changed."""

    locked: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    since: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


@register(
    "surelock",
    paper="Stopping Computation for Converged Tokens in Masked Diffusion-LM Decoding",
    arxiv="2602.06412",
)
class SureLock(Refreshing):
    """Compute all positions but those whose prediction has come to rest.

    A row whose token is decided (given text, too) is locked when the distribution it predicts has
    moved by less than ``eps`` nats, KL(now || step before), between two steps that both saw the
    token; by Pinsker's inequality no probability of it then moved by more than sqrt(eps / 2).  A
    locked row is computed again when its token changes, where a mask is scored by it (shifted
    logits), and in a refresh (``refresh_every``, never by default), which unlocks everything.
    ``eps`` 0 is exact; 1e-3 is this library's choice.

    The head also predicts decided positions that are not locked, and their float32 distributions
    are kept for a step: that costs time and memory with large vocabularies, and pays where long
    texts come to rest early.
    """

    needs = frozenset({OWN_PREDICTIONS})
    offers = REGION
    statistics = frozenset({"kl"})
    limits = bounds(eps=NOT_NEGATIVE)

    eps: float = 1e-3

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        state, length = slots.state(Locked), canvas.length
        if len(state.locked) != len(slots.age):
            state.locked = np.zeros(len(slots.age), np.bool_)
            state.since = np.zeros(len(slots.age), np.int64)
        refresh = self.due(canvas, slots)
        state.locked[slots.pending | refresh] = False
        state.since = np.where(slots.pending, 0, state.since) + 1
        free = np.flatnonzero(~state.locked[:length])
        decided = free[~canvas.masked[free]] + slots.shift
        asks = decided[decided < length]
        return replace(full_plan(canvas), asks=asks) if refresh else Plan(free, asks=asks)

    def after_step(
        self, canvas: Canvas, slots: Slots, positions: IntArray, logprob: FloatArray,
        kl: FloatArray | None = None,
    ) -> None:  # fmt: skip
        state, rows = slots.state(Locked), positions - slots.shift
        assert kl is not None, "it is among the statistics"
        still = (np.maximum(kl, 0) < self.eps) & (rows >= 0) & (state.since[rows] >= STEADY)
        still &= ~canvas.masked[rows] & ~canvas.masked[positions]
        state.locked[rows[still]] = True
