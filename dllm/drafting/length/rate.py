"""Calibrated acceptance, and the controllers that decide with it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from ...canvas import IntArray
from ..base import Array, Budget, Feedback, RoundStats
from .control import CONTROLLERS, LengthController, at_least
from .memory import Memory

DEPTHS = (0, 1, 2, 4, 8, 16)  # lower ends of the depth buckets
CONFIDENCES = 10  # buckets of equal width
REMEMBERED = 200.0  # observations that a cell of the acceptance table starts with at most
KNOWN = 8  # drafts by which it is known what drafting is worth
LOAN = 3.0  # failed drafts that a text may pay before it rests, where earlier ones gained nothing
TRUST = 6.0  # the same where they gained, unless drafts are ``DEAR``
DEAR = 0.8  # tokens that a failed draft costs
TILE = 8  # rows
CONTEXT = 512  # tokens per context bucket of the time model


class Acceptance:
    """How often a drafted token is accepted, by depth, by the drafter's confidence, and by whether
    the draft before was accepted whole.

    A diffusion model's confidence is no probability of acceptance: the table learns the relation
    from verified positions only, i.e. those up to and including the first rejection.  Every cell
    starts from a Beta(1, 1) prior, centred on the confidence itself with the weight of ``prior``
    observations.  The last distinction is there because acceptance comes in runs (DEER, arXiv
    2512.15176, finds it bimodal).
    """

    def __init__(self, prior: float = 2.0) -> None:
        self.prior = prior
        shape = (2, len(DEPTHS), CONFIDENCES)
        self.accepted, self.judged = np.zeros(shape), np.zeros(shape)

    def __call__(
        self, confidence: Array, after_whole: bool = False, optimism: float = 0.0
    ) -> Array:
        """Probability that token i is accepted if all before it were, (w,); ``optimism`` adds so
        many standard errors, which has little-known lengths tried."""
        at = (int(after_whole), *self._cells(confidence))
        weight = self.judged[at] + self.prior
        share: Array = (self.accepted[at] + self.prior * confidence) / weight
        if optimism:
            share = np.minimum(share + optimism * np.sqrt(share * (1 - share) / weight), 0.999)
        return share

    def update(self, confidence: Array, accepted: int, after_whole: bool = False) -> None:
        """Learn from a chain of which ``accepted`` tokens were kept."""
        judged, state = min(accepted + 1, len(confidence)), int(after_whole)
        rows, columns = (index[:judged] for index in self._cells(confidence))
        np.add.at(self.judged[state], (rows, columns), 1)
        np.add.at(self.accepted[state], (rows[:accepted], columns[:accepted]), 1)

    def _cells(self, confidence: Array) -> tuple[IntArray, IntArray]:
        at = np.arange(len(confidence))
        depth = np.searchsorted(DEPTHS, at, side="right").astype(np.int64) - 1
        level = np.clip((confidence * CONFIDENCES).astype(np.int64), 0, CONFIDENCES - 1)
        return depth, level


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


class CostCurve(LineFit):
    """Seconds of a forward by its number of tokens: a line, and what each number is off it.

    Products of few rows are not a line: in float32 twelve rows may cost more than sixteen, in
    bfloat16 sixteen what one costs.  A number that was measured ``trust`` times is believed half;
    a multiple of ``TILE`` that never was counts as ``hope`` cheaper than the line, so that it is
    tried: that is where whole tiles of a product end.
    """

    def __init__(self, fading: float = 0.95, trust: float = 3.0, hope: float = 0.15) -> None:
        super().__init__(fading)
        self.trust, self.hope = trust, hope
        self.off: dict[int, tuple[float, float]] = {}  # tokens -> (measurements, mean of y / line)

    def add(self, x: float, y: float) -> None:
        super().add(x, y)
        line = float(super().__call__(np.array([x]))[0])
        n, mean = self.off.get(int(x), (0.0, 1.0))
        n = self.fading * n + 1
        off = min(y / max(line, 1e-12), 4.0)  # one stalled measurement must not decide anything
        self.off[int(x)] = (n, mean + (off - mean) / n)

    def begun_again(self) -> CostCurve:
        """The same curve, of which what is new soon knows better."""
        one = copy.copy(self)
        one.sums = self.sums * 0.2
        one.off = {tokens: (0.2 * n, mean) for tokens, (n, mean) in self.off.items()}
        return one

    def __call__(self, x: Array) -> Array:
        line = super().__call__(x)
        for i, tokens in enumerate(x.astype(np.int64).tolist()):
            n, mean = self.off.get(tokens, (0.0, 1.0))
            hope = 0.0 if tokens % TILE else self.hope / (1 + n)
            line[i] *= (1 + (mean - 1) * n / (n + self.trust)) * (1 - hope)
        return line


def _curve(curve: Any, sums: Any, off: dict[Any, Any]) -> Any:
    """``curve`` with what it held when it was written."""
    curve.sums = np.array(sums, np.float64)
    if curve.sums.shape != (5,):
        raise ValueError("five sums make a line")
    if off:
        curve.off = {int(at): (float(n), float(mean)) for at, (n, mean) in off.items()}
    return curve


@dataclass
class _Calibrated(LengthController):
    """Shares what it knows about drafter and machine between sequences."""

    k_max: int = 24

    def __post_init__(self) -> None:
        at_least(1, k_max=self.k_max)
        self.acceptance = Acceptance()
        self._reset()

    def fresh(self) -> LengthController:
        one = copy.copy(self)  # the tables are shared, the state of the text is not
        one._reset()
        return one

    def _reset(self) -> None:
        """Forget the text."""
        self._after_whole = False

    def update(self, stats: RoundStats, feedback: Feedback) -> None:
        draft = feedback.draft
        if draft.is_chain and draft.confidence is not None and len(draft):
            confidence = np.asarray(draft.confidence, np.float64)
            self.acceptance.update(confidence, stats.accepted, self._after_whole)
        if stats.depth:
            self._after_whole = stats.depth == stats.accepted


@dataclass
class Saving:
    """Tokens of plain decoding that a drafted round saves: their mean and variance, smoothed by
    ``rho``; ``price`` is what a round costs that does not pay; ``drafts`` were judged; ``credit``
    may be lost by trying again where drafting does not pay."""

    rho: float
    mean: float = 0.0
    variance: float = 0.0
    price: float = 0.5
    drafts: int = 0
    credit: float = 0.0

    def add(self, saved: float) -> None:
        if not self.drafts:
            self.mean = saved
        self.drafts += 1
        off = saved - self.mean
        self.mean += self.rho * off
        self.variance = (1 - self.rho) * (self.variance + self.rho * off * off)
        self.price += 0.1 * (max(-saved, 0.0) - self.price) * (saved < 0)

    @property
    def is_loss(self) -> bool:
        """Whether the mean lies below zero by more than one and a half standard errors."""
        error = (self.variance * self.rho / (2 - self.rho)) ** 0.5
        return self.drafts >= KNOWN and self.mean + 1.5 * error < 0


@CONTROLLERS.register("rate")
@dataclass
class Rate(_Calibrated):
    """The length with the most expected tokens per second, from this round's own confidences.

    Expected tokens come from calibrated acceptance, ``optimism`` standard errors above the estimate
    so that lengths which were never tried are; seconds from a curve fitted to measured rounds, see
    `CostCurve`.  In a batch both are those of the forward that all its texts share.
    Where drafting brings fewer tokens per second than plain decoding, in this text or, at its
    start, in those before, and where a text has lost what it may (`LOAN`, `TRUST`), it stops, and
    tries again as often as ``explore`` of the time pays for, over all texts.  A plain round now and
    then measures what a single token costs.  A design of this library: no paper's.
    """

    optimism: float = 0.2
    explore: float = 0.02
    memory: ClassVar[Memory | None] = None

    def __post_init__(self) -> None:
        self.verify_seconds: dict[int, CostCurve] = {}
        self.draft_seconds = LineFit()
        self.worth = Saving(0.05)
        super().__post_init__()

    def remember(self, memory: Memory | None) -> None:
        """Begin with what ``memory`` holds of earlier calls, and add to it."""
        self.memory = memory  # type: ignore[misc]  # of this one
        known = None if memory is None else memory.read()
        if known is None:
            return
        before = copy.deepcopy(self.__dict__)
        try:
            self._take(known)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
            self.__dict__ = before  # of another hand: learn anew

    def _take(self, known: dict[str, Any]) -> None:
        tables = [np.array(known[name], np.float64) for name in ("accepted", "judged")]
        curves = {int(at): _curve(CostCurve(), *line) for at, line in known["verify"].items()}
        draft = _curve(self.draft_seconds, known["draft"], {})
        numbers = [*(c.sums for c in curves.values()), draft.sums, *tables]
        worth = [float(known["worth"][i]) for i in range(4)]
        shapes = [table.shape == self.acceptance.judged.shape for table in tables]
        whole = all(np.isfinite(part).all() and (part >= 0).all() for part in numbers)
        if not (all(shapes) and whole and np.isfinite(worth).all()):
            raise ValueError("no numbers of ours")
        # what is new is to count: no cell weighs more than so many observations
        share = np.minimum(1.0, REMEMBERED / np.maximum(tables[1], 1.0))
        self.acceptance.accepted[:], self.acceptance.judged[:] = (
            tables[0] * share,
            tables[1] * share,
        )
        self.verify_seconds.update(curves)
        mean, variance, price, drafts = worth
        self.worth = Saving(0.05, mean, max(0.0, variance), max(0.0, price), max(0, int(drafts)))

    def finished(self) -> None:
        worth = self.worth
        if self.memory is None or not worth.drafts:
            return
        self.memory.write({
            "accepted": self.acceptance.accepted.round(2).tolist(),
            "judged": self.acceptance.judged.round(2).tolist(),
            "verify": {str(at): [curve.sums.tolist(), curve.off]
                       for at, curve in self.verify_seconds.items()},
            "draft": self.draft_seconds.sums.tolist(),
            "worth": [worth.mean, worth.variance, worth.price, worth.drafts],
        })  # fmt: skip

    def _reset(self) -> None:
        super()._reset()
        self._context = 0
        self._beside = self._beside_emitted = 0  # of other texts, in the last round
        self._saving = replace(self.worth, rho=0.15)
        gains, price = self.worth.mean > 0 and self.worth.drafts >= KNOWN, self.worth.price
        self._left = np.inf if gains and price > DEAR else (TRUST if gains else LOAN) * price

    def next(self, room: int, context: int) -> Budget:
        self._context = context // CONTEXT
        if (self._doubts and self.worth.credit < self.worth.price) or self._line().lacks_ones:
            return Budget(0, room)
        return Budget(min(self.k_max, room), room, self._refine, self._worth_it)

    @property
    def _doubts(self) -> bool:
        """Whether drafting does not seem to pay here."""
        return self._saving.is_loss or self._left < self.worth.price

    def _refine(self, confidence: Array) -> int:
        confidence = confidence[: self.k_max]
        acceptance = self.acceptance(confidence, self._after_whole, self.optimism)
        alive: Array = np.cumprod(acceptance, dtype=np.float64)
        return self._worth_it(alive)

    def _worth_it(self, alive: Array) -> int:
        """How many tokens to send that are accepted with chances ``alive`` (n,)."""
        lengths = np.arange(len(alive) + 1)
        expected = np.concatenate([[0.0], alive.cumsum()])
        return int(np.argmax((self._beside_emitted + 1 + expected) / self._seconds(lengths)))

    def _seconds(self, drafted: IntArray) -> Array:
        """Seconds of a round with so many ``drafted`` tokens (n,), drafting included."""
        fed = (self._beside + drafted + 1).astype(np.float64)
        seconds: Array = self._line()(fed) + self.draft_seconds(np.zeros(1))
        return seconds

    def _line(self) -> CostCurve:
        """The curve of texts of this length: at first that of the nearest length that was seen."""
        known = self.verify_seconds
        if self._context not in known:
            near = min(known, key=lambda at: abs(at - self._context), default=None)
            known[self._context] = CostCurve() if near is None else known[near].begun_again()
        return known[self._context]

    def update(self, stats: RoundStats, feedback: Feedback) -> None:
        super().update(stats, feedback)
        if stats.first:  # it read the prompt, too
            return
        self._beside, self._beside_emitted = stats.beside, stats.beside_emitted
        fed = stats.beside + stats.drafted + 1
        self._line().add(fed, stats.verify_seconds + stats.other_seconds)
        if self._doubts:
            worth = self.worth
            worth.credit = min(worth.credit + self.explore * stats.emitted, 1.01 * worth.price)
        if stats.attempted:
            self.draft_seconds.add(0.0, stats.draft_seconds)
            self._weigh(stats)

    def _weigh(self, stats: RoundStats) -> None:
        """Compare the round with plain decoding of the same tokens."""
        plain = float(self._line()(np.array([stats.beside + 1.0]))[0])
        spent = stats.draft_seconds + stats.verify_seconds + stats.other_seconds
        token = plain / (stats.beside_emitted + 1)  # seconds per token without drafts
        saved = (plain + (stats.emitted - 1) * token - spent) / token
        if self._doubts:
            self.worth.credit += min(saved, 0.0)
        self._left += saved
        self.worth.add(saved)
        self._saving.add(saved)
