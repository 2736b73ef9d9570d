"""Saber: a threshold that follows the text, and a way back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..canvas import BoolArray, Canvas, FloatArray, IntArray
from ..capabilities import COMMITTED_LOGITS, FIXED_WINDOW, KEEPS_TEXT, PROBABILITY
from ..errors import ConfigError
from .base import NO_SCORES, NOTHING, Part, Reviser, Selector, View, top
from .compose import register
from .windows import WholeRegion

SABER = "Saber: Adaptive Acceleration and Backtracking-Enhanced Remasking for Code Generation"


@register("saber_accept", paper=SABER, arxiv="2510.18165")
@dataclass(frozen=True)
class SaberAccept(Selector):
    """Commit what exceeds the mean probability of all that is committed, at least ``n`` (2)."""

    needs = frozenset({PROBABILITY})

    n: int = 2

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"n must be at least 1, not {self.n}")

    def select(self, view: View) -> BoolArray:
        canvas = view.canvas
        decided = canvas.commit_step >= 0
        mean = float(np.exp(canvas.logprob[decided]).mean()) if decided.any() else 1.0
        chosen: BoolArray = view.score > mean
        return chosen | top(view.score, self.n)


@dataclass
class LastProbabilities:
    """Those of the step before, (N,), or none yet."""

    values: FloatArray = field(default_factory=lambda: NO_SCORES)


@register("saber", paper=SABER, arxiv="2510.18165")
@dataclass(frozen=True)
class Saber(Reviser):
    """Take back the committed tokens whose probability has risen least since the last step.

    After k commits, min(max(k_min // 2, ceil(k / 8)), k - 1) positions of the window are taken
    back (``n`` 2 stands for k_min); nothing is when the window is complete.  The probability of a
    committed token is that of the token itself (the official code takes the likeliest one's).
    Commits come from `SaberAccept` over the whole region, unless other parts are given.
    """

    needs = frozenset({COMMITTED_LOGITS, FIXED_WINDOW, KEEPS_TEXT})

    n: int = 2

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"n must be at least 1, not {self.n}")

    def companions(self) -> tuple[Part, ...]:
        return (SaberAccept(self.n), WholeRegion())

    def wants(self, canvas: Canvas) -> IntArray:
        return np.arange(*canvas.window)

    def asks(self, canvas: Canvas, positions: IntArray) -> IntArray:
        return canvas.tokens[positions][:, None]

    def revise(self, view: View, committed: IntArray) -> IntArray:
        canvas, result = view.canvas, view.everything
        here = result.positions
        decided_before = ~canvas.masked[here] & (canvas.commit_step[here] < canvas.step)
        now = np.zeros(len(canvas.tokens), np.float32)
        now[result.positions] = np.exp(
            np.where(decided_before, result.asked[self.name][:, 0], result.logprob)
        )
        last = canvas.state(LastProbabilities)
        before = last.values if last.values.size else np.zeros_like(now)
        last.values = now
        low, high = canvas.window
        if not canvas.masked[low:high].any():
            return NOTHING
        at = np.flatnonzero((canvas.commit_step >= 0) & ~canvas.given & ~canvas.masked)
        at = at[(at >= low) & (at < high)]
        k = len(committed)
        count = min(max(self.n // 2, -(-k // 8)), k - 1)
        rise = now[at] - before[at]
        return at[top(-rise, count)] if count > 0 else NOTHING
