"""Windows that slide: Deferred Commitment Decoding and Dynamic Sliding Block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..canvas import BoolArray, Canvas
from ..capabilities import REPEATABLE, Capability
from ..errors import ConfigError
from .base import Part, View, Window
from .compose import register
from .eos import Eos


def slide(canvas: Canvas, low: int, high: int) -> None:
    """Move the window; a window that slides stays the same block."""
    if canvas.block < 0:
        canvas.open_window(low, high)
    canvas.window = (low, high)


@register(
    "dcd",
    paper="Deferred Commitment Decoding for Diffusion Language Models with Confidence-Aware "
    "Sliding Windows",
    arxiv="2601.02076",
)
@dataclass(frozen=True)
class DCD(Window):
    """A window that always shows the first ``s_init`` undecided positions, however far they lie.

    It starts at the first undecided position and is at most ``s_max`` (128) wide; what is not sure
    yet waits in it while positions to the right are decided.  ``s_init`` is 16 as in the published
    runs.  With it come the end-of-text rule ``first_commit``, unless another is asked for.

    ``block_length`` confines the window to blocks (semi-causal mode); then ``e_max`` > 0 allows a
    block to be extended by ``e_step`` (4) positions, ``e_max`` in all, whenever the window touches
    its right edge and a commit of the step would score below ``tau_low`` (0.3; -0.5 for entropy
    scores): the step's commits are given up and made again.  The static mode of the
    same code is ``threshold`` with ``eos_policy="block_contains"``.
    """

    s_init: int = 16
    s_max: int = 128
    block_length: int | None = None
    tau_low: float | None = None
    e_step: int = 4
    e_max: int = 0

    def __post_init__(self) -> None:
        for name in ("s_init", "s_max", "e_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.block_length is not None and self.block_length < 1:
            raise ConfigError(f"block_length must be at least 1, not {self.block_length}")
        if self.e_max < 0:
            raise ConfigError(f"e_max must not be negative, not {self.e_max}")
        if self.e_max and self.block_length is None:
            raise ConfigError("e_max extends blocks: pass block_length too")

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        return frozenset() if self.e_max else frozenset({REPEATABLE})

    def companions(self) -> tuple[Part, ...]:
        return (Eos("first_commit"),)

    def advance(self, canvas: Canvas) -> None:
        where = np.flatnonzero(canvas.masked[: canvas.end])
        if not where.size:
            return
        low = int(where[0])
        high = int(where[self.s_init]) if len(where) > self.s_init else canvas.end
        high = min(high, low + self.s_max, canvas.end)
        slide(canvas, low, min(high, self._border(canvas, low)))

    def _border(self, canvas: Canvas, low: int) -> int:
        """The right edge of the current block, extensions included."""
        if self.block_length is None:
            return canvas.end
        edge: int = canvas.memory.get("dcd_edge", canvas.start)
        while edge <= low:
            edge += self.block_length
            canvas.memory["dcd_edge"], canvas.memory["dcd_extended"] = edge, 0
        return min(edge, canvas.end)

    def reconsiders(self, view: View, chosen: BoolArray) -> bool:
        canvas = view.canvas
        edge: int = canvas.memory.get("dcd_edge", canvas.end)
        extended: int = canvas.memory.get("dcd_extended", 0)
        if canvas.window[1] < edge or edge >= canvas.end or extended >= self.e_max:
            return False
        least = view.score[chosen].min() if chosen.any() else view.score.max(initial=-np.inf)
        if self.tau_low is None or least >= self.tau_low:
            return False
        step = min(self.e_step, self.e_max - extended)
        canvas.memory["dcd_edge"], canvas.memory["dcd_extended"] = edge + step, extended + step
        return True


@register(
    "dsb",
    paper="DSB: Dynamic Sliding Block Scheduling for Diffusion LLMs",
    arxiv="2602.05992",
)
@dataclass(frozen=True)
class DSB(Window):
    """A block whose right edge advances by one for every decided position.

    ``block_length`` (32) positions are open at first, and the right edge lies ``block_length`` plus
    the number of decided positions behind the start of the region ("greedy").  ``k_max`` also
    limits the width counted from the first undecided position ("const"; the published width was
    not available).
    """

    offers = frozenset({REPEATABLE})

    block_length: int | None = None
    k_max: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_length", "k_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")

    def advance(self, canvas: Canvas) -> None:
        open_ = canvas.masked[canvas.start : canvas.end]
        if not open_.any():
            return
        low = canvas.start + int(open_.argmax())
        high = canvas.start + (self.block_length or 32) + int((~open_).sum())
        if self.k_max is not None:
            high = min(high, low + self.k_max)
        slide(canvas, low, min(high, canvas.end))
