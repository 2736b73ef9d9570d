"""DPad: drop most masks behind the block, the farther away the more."""

from __future__ import annotations

import numpy as np

from ..core.canvas import SELECTION, Canvas, IntArray
from ..core.limits import COUNT, NOT_NEGATIVE, bounds, one_of
from .base import register
from .suffix import SuffixCache

DROPOUTS = ("gaussian", "uniform")


@register(
    "dpad",
    paper="DPad: Efficient Diffusion Language Models with Suffix Dropout",
    arxiv="2508.14148",
)
class DPadCache(SuffixCache):
    """Keep few of the masks behind the block, drawn once per block; the others do not exist.

    Of the ``window`` (128) positions behind the block, the j-th (from 0) stays with probability
    ``scale`` (2) x the density of the standard normal distribution at ``sigma`` (4) x j /
    (``window`` - 1); those beyond it are dropped.  With ``dropout`` "uniform" ``number`` (16) of
    the first ``window`` positions stay, whichever.  What is kept has its true positions.  The
    published settings differ by task.  ``base`` (default "prefix"): "none", "prefix" or "dual", as
    Fast-dLLM's caches.  The method ends a text behind the block that holds its end:
    ``eos_policy="block_contains"``.
    """

    limits = bounds(
        dropout=one_of(DROPOUTS), window=COUNT, number=NOT_NEGATIVE, sigma=NOT_NEGATIVE,
        scale=NOT_NEGATIVE
    )  # fmt: skip

    dropout: str = "gaussian"
    sigma: float = 4.0
    scale: float = 2.0
    window: int = 128
    number: int = 16

    def kept(self, canvas: Canvas, behind: IntArray) -> IntArray:
        near = behind[behind < canvas.window[1] + self.window]
        if self.dropout == "uniform" and self.number >= len(behind):
            return behind
        noise = canvas.uniform(SELECTION, near) if near.size else np.zeros(0, np.float32)
        if self.dropout == "uniform":
            return np.sort(near[np.argsort(noise, kind="stable")[: self.number]])
        far = self.sigma * (near - canvas.window[1]) / max(self.window - 1, 1)
        kept: IntArray = near[noise < self.scale * np.exp(-(far**2) / 2) / np.sqrt(2 * np.pi)]
        return kept
