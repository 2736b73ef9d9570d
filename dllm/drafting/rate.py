"""Calibrated acceptance, and the controllers that decide with it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..canvas import IntArray
from ..errors import ConfigError
from .base import Array, Budget, Feedback, RoundStats
from .control import CONTROLLERS, LengthController, at_least

DEPTHS = (0, 1, 2, 4, 8, 16)  # lower ends of the depth buckets
CONFIDENCES = 10  # buckets of equal width
CONTEXT = 512  # tokens per context bucket of the time model


class Acceptance:
    """How often a drafted token is accepted, by depth and by the drafter's confidence.

    A diffusion model's confidence is no probability of acceptance: the table learns the relation
    from verified positions only, i.e. those up to and including the first rejection.  Every cell
    starts from a Beta(1, 1) prior, centred on the confidence itself with the weight of ``prior``
    observations.
    """

    def __init__(self, prior: float = 2.0) -> None:
        self.prior = prior
        shape = (len(DEPTHS), CONFIDENCES)
        self.accepted, self.judged = np.zeros(shape), np.zeros(shape)

    def __call__(self, confidence: Array) -> Array:
        """Probability that token i is accepted if all before it were, (w,)."""
        at = self._cells(confidence)
        expected = self.accepted[at] + self.prior * confidence
        share: Array = expected / (self.judged[at] + self.prior)
        return share

    def update(self, confidence: Array, accepted: int) -> None:
        """Learn from a chain of which ``accepted`` tokens were kept."""
        judged = min(accepted + 1, len(confidence))
        rows, columns = (index[:judged] for index in self._cells(confidence))
        np.add.at(self.judged, (rows, columns), 1)
        np.add.at(self.accepted, (rows[:accepted], columns[:accepted]), 1)

    def _cells(self, confidence: Array) -> tuple[IntArray, IntArray]:
        at = np.arange(len(confidence))
        depth = np.searchsorted(DEPTHS, at, side="right").astype(np.int64) - 1
        level = np.clip((confidence * CONFIDENCES).astype(np.int64), 0, CONFIDENCES - 1)
        return depth, level

    def save(self, file: Path) -> None:
        """Write as JSON; valid for one drafter, verifier and temperature."""
        tables = {"accepted": self.accepted.tolist(), "judged": self.judged.tolist()}
        file.write_text(json.dumps(tables), encoding="utf-8")

    def load(self, file: Path) -> Acceptance:
        """Read what `save` wrote; returns itself."""
        try:
            tables = json.loads(file.read_text(encoding="utf-8"))
            accepted, judged = np.array(tables["accepted"]), np.array(tables["judged"])
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"no acceptance table in {file}: {error}") from error
        if accepted.shape != self.accepted.shape or judged.shape != self.judged.shape:
            raise ConfigError(f"the acceptance table in {file} has another shape: record it again")
        self.accepted, self.judged = accepted, judged
        return self


class LineFit:
    """Seconds as a line over the number of tokens, older observations fading."""

    def __init__(self, fading: float = 0.95) -> None:
        self.fading = fading
        self.sums = np.zeros(5)  # 1, x, y, x x, x y

    def add(self, x: float, y: float) -> None:
        n, _, sy, _, _ = self.sums
        if n >= 3:  # one stalled measurement must not decide anything
            y = min(y, 4 * sy / n)
        self.sums = self.fading * self.sums + np.array([1.0, x, y, x * x, x * y])

    @property
    def lacks_ones(self) -> bool:
        """Whether only drafts were measured, so that the price of a token is unknown."""
        n, sx, _, sxx, _ = self.sums
        return bool(n and sx / n > 1.5 and sxx / n - (sx / n) ** 2 < 0.05)

    def __call__(self, x: Array) -> Array:
        n, sx, sy, sxx, sxy = self.sums
        if n == 0:
            return np.ones_like(x)
        mean_x, mean_y = sx / n, sy / n
        spread = sxx / n - mean_x**2
        slope = max(0.0, (sxy / n - mean_x * mean_y) / spread) if spread > 1e-9 else 0.0
        line: Array = np.maximum(mean_y + slope * (x - mean_x), 1e-9 + 0.1 * mean_y)
        return line


@dataclass
class _Calibrated(LengthController):
    """Shares what it knows about drafter and machine between sequences."""

    k_max: int = 24

    def __post_init__(self) -> None:
        at_least(1, k_max=self.k_max)
        self.acceptance = Acceptance()

    def fresh(self) -> LengthController:
        one = copy.copy(self)  # the tables are shared, the state of the text is not
        one._reset()
        return one

    def _reset(self) -> None:
        """Forget the text."""

    def update(self, stats: RoundStats, feedback: Feedback) -> None:
        draft = feedback.draft
        if draft.is_chain and draft.confidence is not None and len(draft):
            self.acceptance.update(np.asarray(draft.confidence, np.float64), stats.accepted)


@CONTROLLERS.register("threshold", paper="SpecDec++: Boosting Speculative Decoding via Adaptive "
                      "Candidate Lengths", arxiv="2405.19715")  # fmt: skip
@dataclass
class Threshold(_Calibrated):
    """The longest draft whose probability of at least one rejection is at most ``h``.

    SpecDec++ trains a head to predict acceptance; here it is the calibrated confidence.
    """

    h: float = 0.8

    def next(self, room: int, context: int) -> Budget:
        return Budget(min(self.k_max, room), room, self._refine)

    def _refine(self, confidence: Array) -> int:
        alive = np.cumprod(self.acceptance(confidence[: self.k_max]))
        return max(1, int((1 - alive <= self.h).sum()))


@CONTROLLERS.register("rate")
@dataclass
class Rate(_Calibrated):
    """The length with the most expected tokens per second, from this round's own confidences.

    Expected tokens come from calibrated acceptance, seconds from a line fitted to measured rounds.
    A draft that was accepted whole doubles the next one, because acceptance is bimodal (DEER, arXiv
    2512.15176); with probability ``explore`` eight tokens more are tried.  While drafting brings
    fewer tokens per second than plain decoding it rests, twice as long each time.  A plain round
    now and then measures what a single token costs.  A design of this library: no paper's.
    """

    explore: float = 0.02
    longest_rest: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.verify_seconds: dict[int, LineFit] = {}
        self.draft_seconds = LineFit()
        self._reset()

    def _reset(self) -> None:
        self._last_whole = 0
        self._rest, self._resting = 1, 0
        self._gain: float | None = None  # seconds that drafting saved per round, smoothed
        self._rounds = 0
        self._context = 0

    def next(self, room: int, context: int) -> Budget:
        self._context = context // CONTEXT
        if self._resting > 0 or self._line().lacks_ones:
            self._resting = max(0, self._resting - 1)
            return Budget(0, room)
        return Budget(min(self.k_max, room), room, self._refine)

    def _refine(self, confidence: Array) -> int:
        confidence = confidence[: self.k_max]
        lengths = np.arange(len(confidence) + 1)
        expected = np.concatenate([[0.0], np.cumprod(self.acceptance(confidence)).cumsum()])
        seconds = self._line()((lengths + 1).astype(np.float64)) + self.draft_seconds(np.zeros(1))
        best = int(np.argmax((1 + expected) / seconds))
        if self._last_whole:
            best = max(best, 2 * self._last_whole)
        self._rounds += 1
        if self._rounds * self.explore % 1 < self.explore:  # every 1 / explore rounds
            best += 8
        return min(best, len(confidence))

    def _line(self) -> LineFit:
        return self.verify_seconds.setdefault(self._context, LineFit())

    def update(self, stats: RoundStats, feedback: Feedback) -> None:
        super().update(stats, feedback)
        if stats.first:  # it read the prompt, too
            return
        self._line().add(stats.drafted + 1, stats.verify_seconds + stats.other_seconds)
        self._last_whole = stats.depth if 0 < stats.depth == stats.accepted else 0
        if stats.attempted:
            self.draft_seconds.add(0.0, stats.draft_seconds)
            self._weigh(stats)

    def _weigh(self, stats: RoundStats) -> None:
        """Compare the round with plain decoding of the same tokens."""
        single = float(self._line()(np.ones(1))[0])
        spent = stats.draft_seconds + stats.verify_seconds + stats.other_seconds
        saved = stats.emitted * single - spent
        self._gain = saved if self._gain is None else self._gain + 0.2 * (saved - self._gain)
        if self._gain < 0 and self._rounds >= 8:
            self._resting, self._rest = self._rest, min(2 * self._rest, self.longest_rest)
        else:
            self._rest = 1
