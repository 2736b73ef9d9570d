"""D2F's cache: the open blocks are computed, decided ones are kept."""

import numpy as np

from ..core.canvas import Canvas, IntArray
from .base import ALL, Cache, Plan, Slots, register
from .delayed import KeptBlocks, borders, decided


@register(
    "d2f",
    paper="Diffusion LLMs Can Do Faster-Than-AR Inference via Discrete Diffusion Forcing",
    arxiv="2508.09192",
)
class D2FCache(Cache):
    """Compute the open blocks alone, and keep those that are decided; nothing behind them exists.

    With ``causal`` (default) attention is block-causal over the prompt and the blocks of the
    window, as D2F's checkpoints are trained, on networks whose own attention is bidirectional; what
    is kept is then exact.  Without it every open block sees the others.  For windows of several
    blocks (``d2f``, ``staged_blocks``); with others the window is the only open block.
    """

    offers = ALL
    survives_growth = True
    branches_slide = True

    causal: bool = True

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        kept = slots.state(KeptBlocks)
        before = kept.end
        kept.advance(decided(canvas, before), 0, 0, False)
        return self._open(canvas, before)

    def branch(self, fork: Canvas, plan: Plan) -> Plan:
        return self._open(fork, int(plan.compute[0]))

    def _open(self, canvas: Canvas, begin: int) -> Plan:
        end = canvas.window[1]
        edges = borders(canvas) if self.causal else None
        return Plan(np.arange(begin, end), np.arange(end), borders=edges)
