"""What a sampler and a cache both read, which do not know each other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .canvas import Canvas, FloatArray, IntArray


@dataclass(slots=True)
class Blocks:
    """The blocks that a window with several of them has opened so far, as ascending ``edges``, one
    more than blocks; empty where a window is one block."""

    edges: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


def certainty_density(canvas: Canvas, sigma: float) -> FloatArray:
    """(end - start,) how much of a Gaussian of width ``sigma`` positions around each position of
    the region lies on decided ones (2509.23094).

    As many positions as the region has count as decided on its left, and as many on its right if
    its last position is decided; what lies beyond does not count as decided.
    """
    decided = ~canvas.masked[canvas.start : canvas.end]
    size = len(decided)
    reach = min(2 * size, int(np.ceil(9 * sigma)))  # beyond, float32 knows no difference
    known = np.concatenate([np.ones(size), decided, np.full(size, float(decided[-1]))])
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    whole = np.exp(-(np.arange(-3 * size, 3 * size) ** 2) / (2 * sigma**2)).sum()
    here = slice(size + reach, 2 * size + reach)
    result: FloatArray = (np.convolve(known, weights)[here] / whole).astype(np.float32)
    return result
