"""The exact cache of block-causal models."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.capabilities import BLOCK_CAUSAL, JUDGED, REPEATED_MASKS
from .base import OPEN_BLOCK, REGION, STEP, Cache, Plan, Slots, register


@dataclass(slots=True)
class Fed:
    """The last forward, of the released code, fed positions up to ``end``."""

    end: int = 0


@register("block", paper="Fast-dLLM v2: Efficient Block-Diffusion LLM", arxiv="2509.26328")
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
    offers = REGION | {JUDGED, REPEATED_MASKS}
    grows = True

    official: bool = False

    @property
    def exact(self) -> bool:
        return not self.official

    @property
    def recompute_pending(self) -> bool:
        return not self.official

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        block_length, length = slots.block_length, canvas.length
        end = min((int(targets[-1]) // block_length + 1) * block_length, length)
        finished = slots.final(canvas)
        if self.official:  # a block is finished when another one is open
            fed, masked = slots.state(Fed), np.flatnonzero(canvas.masked[:length])
            first = min([int(targets[0]), *masked[:1].tolist()])
            finished = min(fed.end, first // block_length * block_length)
            fed.end = end
        # once it begins where the first undecided block does, it holds as long as that is open
        own = not self.official and finished == int(targets[0]) // block_length * block_length
        until = OPEN_BLOCK if own and end - finished == block_length else STEP
        return Plan(np.arange(finished, end), np.arange(end), until=until)
