"""Saber: a threshold that follows the text, and a way back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..core.canvas import BoolArray, Canvas, FloatArray, IntArray
from ..core.capabilities import (
    COMMITTED_LOGITS,
    CONSTRAINED,
    FIXED_LENGTH,
    FIXED_WINDOW,
    KEEPS_TEXT,
    OWN_PREDICTIONS,
    PROBABILITY,
)
from ..core.limits import COUNT, bounds
from .base import NO_SCORES, Part, Reviser, Selector, View, top
from .compose import register
from .turn import Turn
from .windows import WholeRegion

SABER = "Saber: Adaptive Acceleration and Backtracking-Enhanced Remasking for Code Generation"


@dataclass
class History:
    """Probabilities of the step before, (N,), and which positions were ever committed, (N,)."""

    last: FloatArray = field(default_factory=lambda: NO_SCORES)
    ever: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))


@register("saber_accept", paper=SABER, arxiv="2510.18165")
class SaberAccept(Selector):
    """Commit what exceeds the mean probability of all that is committed, at least ``n`` (2).

    ``official``: tokens that were taken back keep counting, as in the released code.
    """

    needs = frozenset({PROBABILITY})
    limits = bounds(n=COUNT)

    n: int = 2
    official: bool = False

    def select(self, view: View) -> BoolArray:
        canvas = view.canvas
        decided = canvas.commit_step >= 0
        ever = canvas.state(History).ever
        if self.official and ever.size:
            decided |= ever
        mean = float(np.exp(canvas.logprob[decided]).mean()) if decided.any() else 1.0
        chosen: BoolArray = view.score > mean
        return chosen | top(view.score, self.n)


@register("saber", paper=SABER, arxiv="2510.18165")
class Saber(Reviser):
    """Take back the committed tokens whose probability has risen least since the last step.

    After k commits, min(max(k_min // 2, ceil(k / 8)), k - 1) positions of the window are taken
    back (``n`` 2 stands for k_min); nothing is when the window is complete.  The probability of a
    committed token is that of the token itself.  Commits come from `SaberAccept` over the whole
    region, unless other parts are given.  ``official`` reproduces the released code: it takes the
    probability of the likeliest token instead, and where there are blocks
    (``cumulative_blocks``) nothing is taken back in the step that opens one.
    """

    needs = frozenset({COMMITTED_LOGITS, FIXED_WINDOW, KEEPS_TEXT, OWN_PREDICTIONS, FIXED_LENGTH})
    offers = frozenset({CONSTRAINED})
    limits = bounds(n=COUNT)

    n: int = 2
    official: bool = False

    def companions(self, family: str) -> tuple[Part, ...]:
        return (SaberAccept(self.n, self.official), WholeRegion())

    def wants(self, canvas: Canvas) -> IntArray:
        return np.arange(*canvas.window)

    def asks(self, canvas: Canvas, positions: IntArray) -> IntArray | None:
        return None if self.official else canvas.tokens[positions][:, None]

    def _probabilities(self, view: View) -> FloatArray:
        """(N,): of the tokens that stand there, or of the likeliest."""
        canvas, result = view.canvas, view.all_predictions
        here, logprob = result.positions, result.logprob
        now = np.full(len(canvas.tokens), -np.inf if self.official else 0, np.float32)
        if not self.official:
            before = ~canvas.masked[here] & (canvas.commit_step[here] < canvas.step)
            logprob = np.where(before, result.asked[self.name][:, 0], logprob)
        now[here] = np.exp(logprob)
        return now

    def decide(self, turn: Turn) -> None:
        committed, view = turn.commit(), turn.view
        canvas, now = view.canvas, self._probabilities(view)
        history = canvas.state(History)
        before = history.last if history.last.size else np.zeros_like(now)
        history.last = now
        history.ever = (canvas.commit_step >= 0) | (history.ever if history.ever.size else False)
        low, high = canvas.window
        if not canvas.masked[low:high].any():
            return
        at = np.flatnonzero((canvas.commit_step >= 0) & ~canvas.given & ~canvas.masked)
        at = at[(at >= low) & (at < high)]
        k = len(committed)
        count = min(max(self.n // 2, -(-k // 8)), k - 1)
        rise = now[at] - before[at]  # infinite where a block has just been opened
        if count > 0:
            turn.take_back(at[top(-rise, count)])
