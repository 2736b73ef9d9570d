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
    """Recompute the window, what it has just left behind, and ``delay`` positions on either side.

    The range begins ``delay`` (2 as in the released runs) positions left of where the window began
    in the step before, but not in the prompt, and ends as many right of the window; ``mode``
    "prefix" goes on to the end of the row ("dual" is the default).  Everything is refreshed after
    ``refresh_after`` commits (their ``refresh_count``, 16 or 32), padding behind an end of text
    counted, and where blocks do not slide, when one opens.  With ``delay`` 0 the range begins with
    the window.

    ``official`` reproduces the released code where it never computes a decided token or padding
    outside the range before the next refresh; by default that is done once.  ``lookahead``
    (default): where logits are shifted, the last position of the range is computed too, although
    it predicts nothing in it.
    """

    by_block = True

    refresh_after: float | None = 32
    delay: int = 2
    mode: str = "dual"
    official: bool = False
    lookahead: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(delay=self.delay)
        if self.mode not in ("dual", "prefix"):
            raise UnknownNameError("mode", self.mode, ("dual", "prefix"))

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        return REGION if self.mode == "prefix" else BLOCK

    @property
    def prompt(self) -> bool:
        return not self.official

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        (low, high), edge = canvas.window, slots.state(Edge)
        before, edge.low = edge.low, low
        if self.due(canvas, slots) or before is None:
            return everything(canvas)
        if self.delay:
            low = min(low, max(before - self.delay, canvas.start))
        high = min(high + self.delay, canvas.length) if self.mode == "dual" else canvas.length
        last = high if self.lookahead else high - slots.shift
        return Plan(span(canvas, low - slots.shift, last))


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
