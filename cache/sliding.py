"""Caches for windows that move at every step: those of DSB and DCD, and dInfer's vicinity.

They recompute the window and a margin around it.  What the window has left behind is computed once
more anyway, because the engine feeds every position in the step after it changed.
"""

from dataclasses import dataclass

import numpy as np

from ..core.canvas import Canvas, IntArray


def span(canvas: Canvas, low: int, high: int) -> IntArray:
    """The live positions of ``[low, high)``."""
    return np.arange(max(0, low), min(high, canvas.length))


@dataclass(slots=True)
class Edge:
    """Where the window of the previous step began; None before the first."""

    low: int | None = None
