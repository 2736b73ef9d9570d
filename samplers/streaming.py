"""Streaming-dLLM: a threshold that falls while the block fills."""

from __future__ import annotations

import numpy as np

from ..core.canvas import BoolArray, Canvas, Suffix
from ..core.capabilities import FIXED_WINDOW, PROBABILITY
from ..core.limits import SHARE, THRESHOLD, bounds
from .base import Part, Selector, View
from .compose import register
from .eos import Eos


@register(
    "streaming",
    paper="Streaming-dLLM: Accelerating Diffusion LLMs via Suffix Pruning and Dynamic Decoding",
    arxiv="2601.17917",
)
class Streaming(Selector):
    """Commit what reaches a threshold that falls with the share of masks, and always the best.

    The threshold is ``tau`` (0.9) x (1 - ``alpha`` (0.3) x (1 - r)), where r is the share of masks
    among the positions from the block on that the row's forwards see: those of the block and what
    a suffix cache keeps behind it (cache ``streaming``), else everything.  The forward that opens a
    block has ``tau`` itself.  With it comes ``eos_policy="block_contains"``, unless another rule is
    asked for.
    """

    needs = frozenset({PROBABILITY, FIXED_WINDOW})
    limits = bounds(tau=THRESHOLD, alpha=SHARE)

    tau: float = 0.9
    alpha: float = 0.3

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Eos("block_contains"),)

    def select(self, view: View) -> BoolArray:
        canvas = view.canvas
        tau = self.tau
        if canvas.block_step:
            masks, seen = _seen(canvas)
            tau *= 1 - self.alpha * (1 - masks / seen)
        chosen: BoolArray = view.score >= tau
        return chosen


def _seen(canvas: Canvas) -> tuple[int, int]:
    """How many positions from the window on the row's forwards see, and the masks among them."""
    (low, high), suffix = canvas.window, canvas.state(Suffix).positions
    behind = np.arange(high, canvas.length) if suffix is None else suffix
    masks = np.count_nonzero(canvas.masked[low:high]) + np.count_nonzero(canvas.masked[behind])
    return int(masks), high - low + len(behind)
