"""The exact cache of block-causal models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..canvas import Canvas, IntArray
from ..capabilities import BLOCK_CAUSAL
from .base import REGION, Cache, Plan, Slots, register


@dataclass(slots=True)
class Finished:
    """Positions left of ``end`` were computed whole after their last decision."""

    end: int = 0


@register("block", paper="Fast-dLLM v2: Efficient Block-Diffusion LLM", arxiv="2509.26328")
@dataclass(frozen=True)
class ExactBlockCache(Cache):
    """Compute from the first unfinished block to the last that is asked about; exact.

    For models whose positions attend to their own block and to those left of it, so that nothing
    on the right of a finished block can change its keys and values.  A block is finished when it
    was computed whole after its last decision; this happens in the first step of the next one, so
    that no forward is spent on storing.
    """

    needs = frozenset({BLOCK_CAUSAL})
    offers = REGION
    grows = True

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        block_length, length = slots.block_length, canvas.length
        # What the last step computed whole and decided stays, unless something in it changed.
        finished = slots.state(Finished).end
        changed = np.flatnonzero(slots.pending[:finished])
        if changed.size:
            finished = int(changed[0]) // block_length * block_length
        masked = np.flatnonzero(canvas.masked[:length])
        frontier = int(masked[0]) // block_length * block_length if masked.size else length
        slots.state(Finished).end = max(finished, frontier)
        end = min((int(targets[-1]) // block_length + 1) * block_length, length)
        return Plan(np.arange(finished, end), np.arange(end))
