"""Caches for windows of several blocks: those of d3LLM and D2F.

A block is computed in every step until it is decided, and a little longer; then it is kept.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..core.canvas import Blocks, Canvas, IntArray
from ..core.limits import COUNT, NOT_NEGATIVE, bounds
from ..core.spec import FamilyDefaults
from .base import ALL, Cache, Plan, Slots, full_plan, register


@dataclass
class KeptBlocks:
    """What is left of ``end`` is kept; ``since``: of decided blocks behind it, by their ends, the
    number of the forward that first found them decided."""

    end: int = 0
    since: dict[int, int] = field(default_factory=dict)

    def advance(self, ends: list[int], forward: int, delay: int, in_turn: bool) -> None:
        """Keep what has waited long enough of the decided blocks that end at ``ends``."""
        for end in ends:
            if forward - self.since.setdefault(end, forward) >= delay:
                self.end = end
            elif in_turn:
                break
        self.since = {end: since for end, since in self.since.items() if end > self.end}


def borders(canvas: Canvas) -> IntArray:
    """Where the blocks of a row begin and end: the text before its region, then each one."""
    edges = canvas.state(Blocks).edges
    return edges if edges.size else np.unique([canvas.start, *canvas.window])


def decided(canvas: Canvas, behind: int) -> list[int]:
    """The ends, greater than ``behind``, of the blocks with nothing undecided up to them."""
    masks = np.flatnonzero(canvas.masked[: canvas.length])
    first = int(masks[0]) if masks.size else canvas.length
    return [int(end) for end in borders(canvas) if behind < end <= first]


@register(
    "delayed",
    paper="d3LLM: Ultra-Fast Diffusion LLM using Pseudo-Trajectory Distillation",
    arxiv="2601.07568",
)
class DelayedCache(Cache):
    """Keep what is left of the first unfinished block, each block a while after it was decided.

    ``delay`` (1; the official ``cache_delay_iter``, 1 or 2 in the cached runs) counts forwards from
    the one that first finds the block decided; the prompt is the first block.  While decided blocks
    wait, everything is computed, what is kept included, and else whatever is not kept.
    ``refresh_every`` (``refresh_interval``, never by default): each forward whose number is a
    multiple of it computes everything.  ``in_turn``: the delay of a block begins when none waits
    before it, as in the code for LLaDA; in that for Dream they wait together.
    """

    offers = ALL
    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"in_turn": True},
        "dream": {"in_turn": False},
    }
    limits = bounds(delay=NOT_NEGATIVE, refresh_every=COUNT)

    delay: int = 1
    refresh_every: float | None = None
    in_turn: bool | None = None

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        kept, forward = slots.state(KeptBlocks), canvas.nfe + 1
        before, ends = kept.end, decided(canvas, kept.end)
        if not before:
            kept.since.setdefault(canvas.start, 0)
        kept.advance(ends, forward, self.delay, bool(self.in_turn))
        due = self.refresh_every is not None and forward % self.refresh_every == 0
        if not before or (kept.end == before and (kept.since or due)):
            return full_plan(canvas)
        return Plan(np.arange(before, canvas.length))
