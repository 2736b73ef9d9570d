"""Caches for windows that move at every step: those of DSB and DCD, and dInfer's vicinity.

They recompute the window and a margin around it.  What the window has left behind is computed once
more anyway, because the engine feeds every position in the step after it changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..canvas import Canvas, IntArray
from ..capabilities import Capability
from ..errors import ConfigError, UnknownNameError
from .base import BLOCK, REGION, Plan, Slots, everything, register
from .refresh import Refreshing


def span(canvas: Canvas, low: int, high: int) -> IntArray:
    """The live positions of ``[low, high)``."""
    return np.arange(max(0, low), min(high, canvas.length))


def _check(**values: int) -> None:
    for name, value in values.items():
        if value < 0:
            raise ConfigError(f"{name} must not be negative, not {value}")


@dataclass(slots=True)
class Edge:
    """Where the window of the previous step began; None before the first."""

    low: int | None = None


@register(
    "dsb", paper="DSB: Dynamic Sliding Block Scheduling for Diffusion LLMs", arxiv="2602.05992"
)
@dataclass(frozen=True)
class DSBCache(Refreshing):
    """Recompute the window and ``before`` positions left of it, or as many as it has moved past.

    ``before`` 24 and ``after`` 0 as released; everything is refreshed after ``refresh_after``
    commits, a block length in the paper.
    """

    offers = BLOCK

    refresh_after: float | None = 32
    before: int = 24
    after: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(before=self.before, after=self.after)

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        low, high = canvas.window
        edge = slots.state(Edge)
        moved = 0 if edge.low is None else low - edge.low
        edge.low = low
        if self.due(canvas, slots):
            return everything(canvas)
        return Plan(span(canvas, low - max(moved, self.before), high + self.after))


@register(
    "dcd",
    paper="Deferred Commitment Decoding for Diffusion Language Models",
    arxiv="2601.02076",
)
@dataclass(frozen=True)
class DCDCache(Refreshing):
    """Recompute the window and the ``delay`` positions it has just left behind.

    ``mode`` "dual" (default) freezes what lies right of the window, "prefix" recomputes it too.
    ``delay`` 2 as in the released runs; everything is refreshed after ``refresh_after`` commits
    (their ``refresh_count``, 16 or 32).
    """

    refresh_after: float | None = 32
    delay: int = 2
    mode: str = "dual"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(delay=self.delay)
        if self.mode not in ("dual", "prefix"):
            raise UnknownNameError("mode", self.mode, ("dual", "prefix"))

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        return REGION if self.mode == "prefix" else BLOCK

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        if self.due(canvas, slots):
            return everything(canvas)
        low, high = canvas.window
        high = high if self.mode == "dual" else canvas.length
        return Plan(span(canvas, low - slots.shift - self.delay, high))


@register(
    "vicinity",
    paper="dInfer: An Efficient Inference Framework for Diffusion Language Models",
    arxiv="2510.08666",
)
@dataclass(frozen=True)
class VicinityCache(Refreshing):
    """Recompute the block and its neighbourhood: ``before`` positions left, ``after`` right of it.

    The keys and values of tokens near the block change most.  Everything is recomputed when a
    block opens and in the first ``warmup`` steps; 16, 16 and 4 as released.
    """

    offers = BLOCK
    by_block = True

    before: int = 16
    after: int = 16
    warmup: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(before=self.before, after=self.after, warmup=self.warmup)

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        if self.due(canvas, slots) or canvas.nfe <= self.warmup:
            return everything(canvas)
        low, high = canvas.window
        return Plan(span(canvas, low - slots.shift - self.before, high + self.after))
