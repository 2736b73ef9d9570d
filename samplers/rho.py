"""rho-EOS: a canvas that gets longer or shorter at its end, as the end of the text is more or less
expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np

from ..core.canvas import Canvas, Edit, IntArray
from ..core.capabilities import REGION_LOGITS, WHOLE_TEXT, Capability
from ..core.errors import ConfigError
from ..core.limits import COUNT, bounds, one_of
from .append import after_a_miss
from .base import Length, Part, Prediction, View
from .compose import register
from .threshold import Threshold

STEPS = 64  # after which the length is left alone
SCHEDULES: dict[str, Callable[[int], int]] = {
    "const": lambda k: 1,
    "linear": lambda k: k,
    "exp": lambda k: 1 << (k - 1),
}


def expects_end(prediction: Prediction, eos: int | None) -> Prediction:
    """The positions whose likeliest token is the end of the text."""
    best = prediction.token if prediction.top_token is None else prediction.top_token[:, 0]
    return prediction.take(best == eos)


def end_confidence(prediction: Prediction, eos: int | None, tokens: int) -> float:
    """Probability of the end of the text at the last ``tokens`` positions where it is the likeliest
    token, divided by ``tokens``: also where there are fewer."""
    last = expects_end(prediction, eos)
    sure = last.logprob if last.top_logprob is None else last.top_logprob[:, 0]
    return float(np.exp(sure[-tokens:].astype(np.float64)).sum()) / tokens


@dataclass
class Looked:
    """Steps taken, and whether the length is left alone from now on."""

    steps: int = 0
    frozen: bool = False


@register(
    "rho", paper="Training-Free Bidirectional Variable-Length Denoising with rho-EOS",
    arxiv="2601.22527",
)  # fmt: skip
class Rho(Length):
    """Append masks where hardly any end of the text is expected, cut some off where many are.

    The region begins with ``initial`` (64) positions.  After each step a signal below ``low``
    appends, one above ``high`` cuts up to 8 times ``expand`` positions, by ``schedule`` ("const",
    "linear" or "exp") in the distance from the bound.  ``signal``: "confidence", the probability of
    the end of the text at the last ``tokens`` positions that propose it, decided ones included, as
    in the released code; or "density", the share of undecided positions that propose it, as in the
    paper.  The length is left alone after 64 steps, or when it has reached the most there may be.
    A cut stops at decided text, and an answer without an end gets another ``block`` (32); not so
    with ``official``.
    """

    statistics = {"top_token": 1}
    limits = bounds(
        initial=COUNT, expand=COUNT, tokens=COUNT, block=COUNT, schedule=one_of(SCHEDULES),
        signal=one_of(("confidence", "density"))
    )  # fmt: skip

    initial: int | None = None
    low: float = 0.4
    high: float = 0.6
    expand: int = 8
    schedule: str = "exp"
    signal: str = "confidence"
    tokens: int = 32
    block: int | None = None
    official: bool = False
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.low <= self.high <= 1:
            raise ConfigError(f"low={self.low} and high={self.high} lie in [0, 1], in this order")

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        return frozenset({WHOLE_TEXT if self.signal == "confidence" else REGION_LOGITS})

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Threshold(0.9),)

    def wants(self, canvas: Canvas) -> IntArray | None:
        here = np.arange(canvas.start, canvas.end)
        return here if self.signal == "confidence" else here[canvas.masked[here]]

    def _signal(self, view: View, committed: IntArray) -> float:
        seen = view.all_predictions
        if self.signal == "confidence":
            return end_confidence(seen, self.eos_token_id, self.tokens)
        canvas = view.canvas
        open_ = seen.take(canvas.masked[seen.positions] | np.isin(seen.positions, committed))
        return len(expects_end(open_, self.eos_token_id).positions) / max(1, len(open_.positions))

    def resize(self, view: View, committed: IntArray) -> tuple[Edit, ...]:
        canvas, looked = view.canvas, view.canvas.state(Looked)
        size = canvas.end - canvas.start
        looked.frozen |= looked.steps >= STEPS or size >= canvas.cap
        looked.steps += 1
        signal = self._signal(view, committed)
        if not looked.frozen and not self.low <= signal <= self.high:
            gap = max(self.low - signal, signal - self.high)
            count = min(SCHEDULES[self.schedule](max(1, ceil(gap / 0.1))), 8) * self.expand
            if signal < self.low:
                return (Edit(canvas.end, 0, min(count, canvas.cap - size)),)
            end = max(canvas.end - count, canvas.start, canvas.text_floor)
            if not self.official:
                text = ~canvas.masked[: canvas.end] & (
                    canvas.tokens[: canvas.end] != self.eos_token_id
                )
                end = max(end, int(text.nonzero()[0][-1]) + 1, canvas.start + 1)
            if end < canvas.end:
                return (Edit(end, canvas.end - end, 0),)
        return () if self.official else after_a_miss(view, self.block or 32)
