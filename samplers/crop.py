"""An answer whose canvas is cut to size before it is written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.canvas import Canvas, Edit, IntArray
from ..core.limits import COUNT, SHARE, bounds
from .append import after_a_miss
from .base import Length, Prediction, View
from .compose import register
from .turn import Turn


@dataclass
class Probed:
    """Whether the first forward has been looked at."""

    done: bool = False


@register(
    "crop", paper="Natively Length-Aware Decoding for Diffusion Language Models", arxiv="2603.06123"
)
class Crop(Length):
    """Look at the whole canvas once, and cut it off where the answer is likely to have ended.

    One forward on the largest canvas, of at most ``initial`` (1024) positions, gives every
    position's probability of the end-of-text token; the canvas ends with the first position by
    which the text has not ended with a probability below ``tau``.  Decoding then goes on as usual,
    and gets another ``block`` (32) where no end of text was written.  The paper's ``tau`` is not
    known; on the bundled model 0.5, 0.1 and 0.01 gave the same answers.
    """

    within = False
    first = 1024
    limits = bounds(initial=COUNT, block=COUNT, tau=SHARE)

    tau: float = 0.1
    initial: int | None = None
    block: int | None = None
    eos_token_id: int | None = None

    def wants(self, canvas: Canvas) -> IntArray | None:
        return np.arange(canvas.start, canvas.end) if not canvas.state(Probed).done else None

    def asks(self, canvas: Canvas, positions: IntArray) -> IntArray | None:
        done = canvas.state(Probed).done
        return None if done else np.full((len(positions), 1), self.eos_token_id)

    def decide(self, turn: Turn) -> None:
        if turn.canvas.state(Probed).done:
            super().decide(turn)
        else:
            turn.probe, turn.edits = True, self._cropped(turn.canvas, turn.seen[0].prediction)

    def _cropped(self, canvas: Canvas, prediction: Prediction) -> tuple[Edit, ...]:
        canvas.state(Probed).done = True
        lasts = np.cumprod(1 - np.exp(prediction.asked[self.name][:, 0].astype(np.float64)))
        over = np.flatnonzero(lasts < self.tau)
        end = int(prediction.positions[over[0]]) + 1 if over.size else canvas.end
        end = max(end, int(np.flatnonzero(~canvas.masked[: canvas.end])[-1]) + 1)
        return (Edit(end, canvas.end - end, 0),) if end < canvas.end else ()

    def resize(self, view: View, committed: IntArray) -> tuple[Edit, ...]:
        return after_a_miss(view, self.block or 32)
