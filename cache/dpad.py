"""DPad: drop most masks behind the block, the farther away the more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..canvas import SELECTION, Canvas, IntArray
from ..errors import ConfigError, UnknownNameError
from .base import register
from .suffix import SuffixCache

DROPOUTS = ("gaussian", "uniform")


@register(
    "dpad",
    paper="DPad: Efficient Diffusion Language Models with Suffix Dropout",
    arxiv="2508.14148",
)
@dataclass(frozen=True)
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

    dropout: str = "gaussian"
    sigma: float = 4.0
    scale: float = 2.0
    window: int = 128
    number: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout not in DROPOUTS:
            raise UnknownNameError("dropout", self.dropout, DROPOUTS)
        if self.window < 1 or self.number < 0 or not self.sigma >= 0 or not self.scale >= 0:
            raise ConfigError("dpad wants window >= 1, number >= 0, sigma >= 0 and scale >= 0")

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
