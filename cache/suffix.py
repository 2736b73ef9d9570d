"""Caches that leave out most of what lies behind the open block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.canvas import Canvas, IntArray, Suffix
from ..core.limits import bounds, one_of
from .base import BLOCK, Plan, Slots
from .refresh import Refreshing

BASES = ("none", "prefix", "dual")


@dataclass(frozen=True)
class SuffixCache(Refreshing):
    """Feed and read only some of the undecided positions behind the window, chosen when a block
    opens or its end moves; given text there stays.

    ``base``: what else a step computes.  "none": all that it reads; "prefix": the window and what
    is kept behind it; "dual": the window.  The last two compute all that they read when a block
    opens.  What is left out is not predicted, either.
    """

    offers = BLOCK
    by_block = True
    limits = bounds(base=one_of(BASES))

    base: str = "prefix"

    def kept(self, canvas: Canvas, behind: IntArray) -> IntArray:
        """Those of the undecided positions ``behind`` the window that stay, ascending."""
        raise NotImplementedError

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        suffix, (low, high) = canvas.state(Suffix), canvas.window
        due = self.due(canvas, slots)
        if suffix.window != (canvas.block, high):
            suffix.window, due = (canvas.block, high), True
            behind = canvas.masked[high : canvas.length].nonzero()[0] + high
            given = (~canvas.masked[high : canvas.length]).nonzero()[0] + high
            suffix.positions = np.union1d(self.kept(canvas, behind), given)
        assert suffix.positions is not None
        ahead = suffix.positions
        ahead = ahead[(ahead >= high) & (ahead < canvas.length)]
        read = np.concatenate([np.arange(high), ahead])
        if due or self.base == "none":
            return Plan(read, read)
        if self.base == "dual":
            return Plan(np.arange(low, high), read)
        return Plan(read[low:], read)
