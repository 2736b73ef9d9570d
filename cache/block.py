"""The exact cache of block-causal models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..canvas import Canvas, IntArray
from ..capabilities import BLOCK_CAUSAL, SHADOW
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

    ``official``: a block keeps the keys and values of its last forward, as the released code of
    T2M remasking has it.  What that forward decided stays a mask to the blocks behind it: cheaper
    by a block per block, and not exact.
    """

    needs = frozenset({BLOCK_CAUSAL})
    offers = REGION | {SHADOW}
    grows = True

    official: bool = False

    @property
    def recompute_pending(self) -> bool:
        return not self.official

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        block_length, length = slots.block_length, canvas.length
        # What the last step computed whole and decided stays, unless something in it changed.
        finished = slots.state(Finished).end
        changed = np.flatnonzero(slots.pending[:finished])
        if changed.size and not self.official:
            finished = int(changed[0]) // block_length * block_length
        end = min((int(targets[-1]) // block_length + 1) * block_length, length)
        masked = np.flatnonzero(canvas.masked[:length])
        first = int(masked[0]) if masked.size else length
        if self.official:  # a block is finished when another one is open
            first = min(first, int(targets[0]))
            finished = min(finished, first // block_length * block_length)
            slots.state(Finished).end = end
            return Plan(np.arange(finished, end), np.arange(end))
        frontier = first // block_length * block_length if masked.size else length
        slots.state(Finished).end = max(finished, min(frontier, end))
        return Plan(np.arange(finished, end), np.arange(end))
