"""Dynamic Sliding Block: a block whose right edge advances with every commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..core.canvas import Canvas, Fed, FloatArray
from ..core.capabilities import DSB_CACHE, REPEATABLE, Capability
from ..core.limits import COUNT, NOT_NEGATIVE, bounds
from ..core.spec import FamilyDefaults
from .base import Part, Prediction, Window
from .compose import register
from .dcd import slide
from .scorers import Probability
from .turn import Course, Turn


@dataclass
class ReleasedBlock:
    """The released code's block, ``low`` to ``high``; how far what is fed reaches beyond it; the
    masks that were left when everything was computed last, None before the first time."""

    low: int = 0
    high: int = 0
    suffix: int = 0
    masks: int | None = None


@register(
    "dsb", paper="DSB: Dynamic Sliding Block Scheduling for Diffusion LLMs", arxiv="2602.05992"
)
class DSB(Window):
    """A block whose right edge advances by one for every decided position.

    ``block_length`` (32) positions are open at first, and the right edge lies ``block_length`` plus
    the number of decided positions behind the start of the region ("greedy").  ``k_max`` also
    limits the width counted from the first undecided position ("const"; ``block_length`` in the
    published runs).

    ``official`` reproduces what the released code does beside its cache, with
    ``cache="dsb(official=True)"`` and ``before`` and ``after`` as that cache has them otherwise.
    There the right edge counts from where the slice that is fed begins, so that positions behind
    the block are committed, too; on Dream a step that computes everything commits exactly the first
    undecided position (``force_first``), and the first two positions of a slice are predicted from
    the same row.
    """

    limits = bounds(block_length=COUNT, k_max=COUNT, before=NOT_NEGATIVE, after=NOT_NEGATIVE)
    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"force_first": False},
        "dream": {"force_first": True},
    }

    block_length: int | None = None
    k_max: int | None = None
    official: bool = False
    before: int = 24
    after: int = 0
    force_first: bool | None = None

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        return frozenset({DSB_CACHE} if self.official else ())

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        return frozenset({DSB_CACHE} if self.official else {REPEATABLE})

    def companions(self, family: str) -> tuple[Part, ...]:
        first = family == "dream" if self.force_first is None else self.force_first
        forced = (FirstOfAll(),) if first else ()
        return (SecondOfEquals(), *forced) if self.official else ()

    def advance(self, canvas: Canvas) -> None:
        open_ = canvas.masked[canvas.start : canvas.end]
        if self.official:
            return self._released(canvas)
        low = canvas.start + int(open_.argmax())
        slide(canvas, low, self._edge(canvas, low))

    def _edge(self, canvas: Canvas, low: int) -> int:
        """Where a block that begins at ``low`` ends."""
        decided = ~canvas.masked[canvas.start : canvas.end]
        high = canvas.start + (self.block_length or 32) + int(decided.sum())
        high = high if self.k_max is None else min(high, low + self.k_max)
        return min(high, canvas.end)

    def _released(self, canvas: Canvas) -> None:
        """Move the released code's block, and say what it feeds."""
        block, fed = canvas.state(ReleasedBlock), canvas.state(Fed)
        masks, moved = int(canvas.masked.sum()), 0
        fed.whole = block.masks is None or block.masks - masks >= (self.block_length or 32)
        if block.masks is None:
            block.low, block.suffix = canvas.start, self.after
        else:  # past the block, if nothing in it is undecided
            open_ = canvas.masked[block.low : block.high]
            moved = int(open_.argmax()) if open_.any() else len(open_)
            block.low += moved
        if fed.whole:
            block.masks = masks
        block.high = self._edge(canvas, block.low)
        block.suffix = min(block.suffix, canvas.end - block.high)
        fed.first = block.low - min(max(moved, self.before), block.low)
        fed.end = block.high + block.suffix
        high = block.high if fed.whole else min(fed.end, fed.first + block.high)
        first = canvas.start + int(canvas.masked[canvas.start : canvas.end].argmax())
        slide(canvas, block.low, max(high, first + 1))


@dataclass(frozen=True)
class FirstOfAll(Course):
    """Exactly the first undecided position in a step that computes everything."""

    name = "first_of_all"

    def decide(self, turn: Turn) -> None:
        if turn.canvas.state(Fed).whole and not turn.stopped():
            turn.choose_these(np.arange(len(turn.view.positions)) == 0)


@dataclass(frozen=True)
class SecondOfEquals(Probability):
    """The probability; of a first two that are equal the released code takes the second."""

    def score(self, canvas: Canvas, prediction: Prediction) -> FloatArray:
        score = super().score(canvas, prediction)
        if len(score) > 1 and score[0] == score[1]:
            score[0] = np.nextafter(score[0], np.float32(0))
        return score
