"""DAEDAL: a first length from the confidence in an end, then insertions where it is unsure."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..core.canvas import Canvas, Edit, IntArray
from ..core.capabilities import WHOLE_TEXT
from ..core.limits import COUNT, SHARE, bounds
from .append import after_a_miss
from .base import Part, Prediction, Reads, View
from .compose import register
from .threshold import Threshold
from .turn import Length, Turn


def end_confidence(prediction: Prediction, eos: int | None, tokens: int) -> float:
    """Probability of the end of the text at the last ``tokens`` positions where it is the likeliest
    token, divided by ``tokens``: also where there are fewer."""
    top, sure = prediction.token, prediction.logprob
    if prediction.top_token is not None and prediction.top_logprob is not None:
        top, sure = prediction.top_token[:, 0], prediction.top_logprob[:, 0]
    return float(np.exp(sure[top == eos][-tokens:].astype(np.float64)).sum()) / tokens


@dataclass
class First:
    """Forwards that looked for the first length, and whether it is found."""

    forwards: int = 0
    found: bool = False


@register(
    "daedal", paper="Beyond Fixed: Training-Free Variable-Length Denoising for Diffusion Large "
    "Language Models", arxiv="2508.00819",
)  # fmt: skip
class Daedal(Length):
    """Lengthen the empty canvas until an end is expected, then insert masks where it is unsure.

    First the region, which has ``initial`` (64) positions, gets ``expand`` masks per forward, and
    ``growth`` times as many each time (1 as published), until the confidence in an end of the text,
    over the last ``tokens`` positions that propose one, reaches ``enough``; then half as many
    decided ends follow.  While the text is written, the least confident undecided position of the
    block, if below ``low``, becomes ``expand`` masks after each step in which that confidence is
    below ``insert_until``; not with ``insert=False``.  An insertion never pushes anything out, and
    an answer without an end gets another ``block`` (32).
    """

    needs = frozenset({WHOLE_TEXT})
    statistics: ClassVar = {"top_token": 1}
    limits = bounds(
        initial=COUNT, expand=COUNT, tokens=COUNT, block=COUNT, growth=COUNT, enough=SHARE,
        insert_until=SHARE, low=SHARE
    )  # fmt: skip

    initial: int | None = None
    expand: int = 8
    enough: float = 0.5
    insert_until: float = 0.9
    low: float = 0.1
    tokens: int = 32
    insert: bool = True
    growth: float = 1.0
    block: int | None = None
    eos_token_id: int | None = None

    @property
    def edits(self) -> str:  # type: ignore[override]
        return "text" if self.insert else "blocks"

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Threshold(0.9),)

    def reads(self, canvas: Canvas) -> Reads:
        return Reads(np.arange(canvas.start, canvas.end))

    def decide(self, turn: Turn) -> None:
        if turn.canvas.state(First).found:
            super().decide(turn)
        else:
            turn.probe, turn.edits = True, self._lengthen(turn.canvas, turn.seen[0].prediction)

    def _lengthen(self, canvas: Canvas, prediction: Prediction) -> tuple[Edit, ...]:
        first, room = canvas.state(First), canvas.cap - (canvas.end - canvas.start)
        sure = end_confidence(prediction, self.eos_token_id, self.tokens)
        if sure < self.enough and room > 0:
            added = int(min(self.expand * self.growth**first.forwards, room))
            first.forwards += 1
            return (Edit(canvas.end, 0, added),)
        first.found = True
        tail = min(self.tokens // 2, room)
        return (Edit(canvas.end, 0, tail, self.eos_token_id),) if tail else ()

    def resize(self, view: View, committed: IntArray) -> tuple[Edit, ...]:
        canvas, p = view.canvas, view.prediction
        room = canvas.cap - (canvas.end - canvas.start)
        unsure = ~np.isin(p.positions, committed) & (np.exp(p.logprob) < self.low)
        sure = end_confidence(view.all_predictions, self.eos_token_id, self.tokens)
        if self.insert and unsure.any() and sure < self.insert_until and room > 0:
            at = int(p.positions[unsure][p.logprob[unsure].argmin()])
            return (Edit(at, 1, min(self.expand, room + 1)),)
        return after_a_miss(view, self.block or 32)
