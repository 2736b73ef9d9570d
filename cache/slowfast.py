"""SlowFast's own saving: what lies behind the cycle is left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.canvas import Canvas, Cycle, IntArray
from .base import PARTIAL, Cache, Plan, Slots, full_plan, register


@dataclass
class Cut:
    """The end of the cycle that is being decided, -1 while the sampler explores."""

    end: int = -1


@register(
    "slowfast",
    paper="Accelerating Diffusion Large Language Models with SlowFast Sampling",
    arxiv="2506.10848",
)
class SlowFastCache(Cache):
    """Compute everything, but from the second forward of a cycle on nothing behind the cycle.

    For the sampler ``slowfast``, as in its released code; with other samplers it is ``none``.
    Nothing is stored.
    """

    offers = PARTIAL
    stores = False

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        cycle, cut = canvas.state(Cycle), slots.state(Cut)
        again = not cycle.exploring and cut.end == cycle.end
        cut.end = -1 if cycle.exploring else cycle.end
        return Plan(np.arange(cycle.end)) if again else full_plan(canvas)
