"""Fast-dLLM's dual cache: freeze everything outside the open block."""

from __future__ import annotations

from dataclasses import dataclass

from ..canvas import Canvas
from .base import BLOCK, register
from .prefix import FAST_DLLM, BlockCache


@register("dual", paper=FAST_DLLM, arxiv="2505.22618")
@dataclass(frozen=True)
class DualCache(BlockCache):
    """Freeze everything outside the open block; recompute the block alone."""

    offers = BLOCK

    def first_to_last(self, canvas: Canvas) -> tuple[int, int]:
        return canvas.window
