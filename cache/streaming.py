"""Streaming-dLLM: of what lies behind the block only the next positions and the last one."""

from __future__ import annotations

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.limits import NOT_NEGATIVE, bounds
from .base import register
from .suffix import SuffixCache


@register(
    "streaming",
    paper="Streaming-dLLM: Accelerating Diffusion LLMs via Suffix Pruning and Dynamic Decoding",
    arxiv="2601.17917",
)
class StreamingCache(SuffixCache):
    """Keep the ``window`` (96) masks behind the block and the last one; drop the others.

    The last one says how long the text is.

    ``base`` (default "prefix", as published): "none", "prefix" or "dual".  The threshold of the
    method is the sampler ``streaming``.
    """

    limits = bounds(window=NOT_NEGATIVE)

    window: int = 96

    def kept(self, canvas: Canvas, behind: IntArray) -> IntArray:
        return np.union1d(behind[: self.window], behind[-1:])
