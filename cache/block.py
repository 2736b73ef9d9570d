"""The exact cache of block-causal models."""

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.capabilities import BLOCK_CAUSAL
from .base import ALL, OPEN_BLOCK, STEP, Cache, Plan, Slots, register


@register("block", paper="Fast-dLLM v2: Efficient Block-Diffusion LLM", arxiv="2509.26328")
class ExactBlockCache(Cache):
    """Compute from the first unfinished block to the last that is asked about; exact.

    For models whose positions attend to their own block and to those left of it, so that nothing
    on the right of a finished block can change its keys and values.  A block is finished when it
    was computed whole after its last decision; this happens in the first step of the next one, so
    that no forward is spent on storing.
    """

    needs = frozenset({BLOCK_CAUSAL})
    offers = ALL | {BLOCK_CAUSAL}
    survives_growth = exact = True

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        block_length = slots.block_length
        end, finished = slots.end(canvas, targets), slots.final(canvas)
        # once it begins where the first undecided block does, it holds as long as that is open
        own = finished == canvas.block_at(int(targets[0]), block_length)[0]
        until = OPEN_BLOCK if own and end - finished == block_length else STEP
        return Plan(np.arange(finished, end), np.arange(end), until=until)
