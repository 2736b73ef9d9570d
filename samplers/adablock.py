"""AdaBlock: a block ends where the text does."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..core.canvas import Canvas
from ..core.limits import SOME_SHARE, THRESHOLD, bounds
from ..core.spec import FamilyDefaults
from .base import Prediction
from .compose import register
from .windows import StaticBlocks


@dataclass
class Opening:
    """Whether the block has been opened, but not yet been given its size."""

    pending: bool = False


@register(
    "adablock",
    paper="AdaBlock-dLLM: Semantic-Aware Diffusion LLM Inference via Adaptive Block Size",
    arxiv="2509.26432",
)
class AdaBlock(StaticBlocks):
    """Choose each block's size when it opens: up to the most confident delimiter ahead.

    Looks at the proposals of the next ``fraction`` (0.25) of the region; if one of the
    ``delimiters`` (ids; default: every token with a line break in it) is proposed there with
    probability >= ``delimiter_threshold`` (LLaDA 0.3, Dream 0.5), the block ends with the likeliest
    of them, otherwise it has ``block_length`` (32; the paper uses 16, 32 and 64) positions.
    Opening a block costs no forward: its first commits come from the same predictions.  At
    temperature > 0 the proposals are those that were drawn, on Dream the likeliest tokens
    (``likeliest``), as in the official code.
    """

    statistics: ClassVar = {"max_logprob": 1, "top_token": 1}
    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"delimiter_threshold": 0.3, "likeliest": False},
        "dream": {"delimiter_threshold": 0.5, "likeliest": True},
    }
    limits = bounds(delimiter_threshold=THRESHOLD, fraction=SOME_SHARE)

    delimiters: tuple[int, ...] | None = None
    delimiter_threshold: float | None = None
    fraction: float = 0.25
    likeliest: bool | None = None

    def advance(self, canvas: Canvas) -> None:
        low, high = canvas.window
        if canvas.masked[low:high].any():
            return
        while high < canvas.end and not canvas.masked[high]:
            high += 1  # given text needs no block of its own
        reach = max(self._ahead(canvas), self.block_length or 32)
        canvas.open_window(high, min(high + reach, canvas.end))
        canvas.state(Opening).pending = True

    def _ahead(self, canvas: Canvas) -> int:
        """How many positions are searched for a delimiter."""
        start, end = canvas.region
        return int(self.fraction * (end - start))

    def settle(self, canvas: Canvas, prediction: Prediction) -> None:
        opening = canvas.state(Opening)
        if not opening.pending:
            return
        opening.pending = False
        ahead, low, end = self._ahead(canvas), canvas.window[0], canvas.end
        size = min(self.block_length or 32, end - low)
        at = prediction.positions
        here = (at >= low) & (at < min(low + ahead, end)) & canvas.masked[at]
        p, token, score = prediction, prediction.token, prediction.logprob
        if self.likeliest and p.top_token is not None and p.max_logprob is not None:
            token, score = p.top_token[:, 0], p.max_logprob
        result = (here & np.isin(token, self.delimiters or ())).nonzero()[0]
        if result.size:
            best = result[score[result].argmax()]
            if np.exp(score[best]) >= (self.delimiter_threshold or 0.0):
                size = int(at[best]) - low + 1
        canvas.window = (low, low + size)
