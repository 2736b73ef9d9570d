"""What a sweep is summed up with: intervals, paired tests, and the area under its curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

from ..core.errors import ConfigError

LEVEL = 0.95
Z95 = float(stats.norm.ppf((1 + LEVEL) / 2))
DROP = 5.0  # points of accuracy below the slowest setting at which a setting no longer counts
ALPHA = 3.0

Draws = npt.NDArray[np.float64]  # a figure of every bootstrap sample
Point = tuple[float, float]  # tokens per forward, accuracy in percent


def wilson(right: int, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson score interval of a share (Wilson 1927): ``right`` of ``n``, as shares in [0, 1]."""
    if n < 1:
        raise ConfigError("an interval needs at least one example")
    result = stats.binomtest(int(right), n).proportion_ci(level, method="wilson")
    return float(result.low), float(result.high)


@dataclass(frozen=True)
class Paired:
    """Two methods on the same examples: shares, their difference, its interval, and the p-value of
    the exact McNemar test (two-sided).  ``only_a``, ``only_b``: examples that one alone solves."""

    difference: float
    low: float
    high: float
    p_value: float
    only_a: int
    only_b: int


def paired(a: Sequence[bool], b: Sequence[bool], z: float = Z95) -> Paired:
    """Compare two methods example by example; the interval is Tango's score interval (1998),
    which stays honest where they never differ."""
    if len(a) != len(b) or not len(a):
        raise ConfigError(f"paired results have one length, not {len(a)} and {len(b)}")
    x, y = np.asarray(a, bool), np.asarray(b, bool)
    only_a, only_b, n = int((x & ~y).sum()), int((~x & y).sum()), len(x)
    low, high = _tango(only_a, only_b, n, z)
    return Paired((only_a - only_b) / n, low, high, _mcnemar(only_a, only_b), only_a, only_b)


def _mcnemar(only_a: int, only_b: int) -> float:
    """Chance of a split at least this uneven among the examples on which they differ."""
    n = only_a + only_b
    return float(stats.binomtest(only_a, n).pvalue) if n else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for being many (Holm 1979), in the same order.

    Calling those below a level significant keeps the chance of one false claim or more among all
    of them below that level, whatever their dependence.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, (len(p_values) - rank) * p_values[i])
        adjusted[i] = min(1.0, largest)
    return adjusted


def _tango(only_a: int, only_b: int, n: int, z: float) -> tuple[float, float]:
    """All differences that a score test at ``z`` does not reject."""

    def score(delta: float) -> float:
        b, c = only_a, only_b
        half = -b - c + (2 * n - b + c) * delta
        root = math.sqrt(max(0.0, half * half - 8 * n * (-c * delta * (1 - delta))))
        q = (root - half) / (4 * n)
        variance = n * (2 * q + delta * (1 - delta))
        gap = b - c - n * delta
        if variance < 1e-12:
            return 0.0 if abs(gap) < 1e-12 else math.copysign(math.inf, gap)
        return gap / math.sqrt(variance)

    seen = (only_a - only_b) / n
    # At the ends the score is infinite, or the interval ends there.
    low = -1.0 if score(-1.0) <= z else optimize.bisect(lambda d: score(d) - z, -1.0, seen)
    high = 1.0 if score(1.0) >= -z else optimize.bisect(lambda d: score(d) + z, seen, 1.0)
    return float(low), float(high)


def weight(accuracy: float, best: float, alpha: float = ALPHA) -> float:
    """What a point of that accuracy counts: less the further it is below ``best``."""
    return min(math.exp(-alpha * (1 - accuracy / best)), 1.0)


def aup(points: Sequence[Point], best: float, alpha: float = ALPHA) -> float:
    """Accuracy under parallelism as its leaderboard computes it (d3LLM, AUP_leaderboard).

    ``points``: (tokens per forward, accuracy in percent), ``best``: the highest accuracy of any
    method on the task.  Points more than 5 below the slowest one's accuracy are dropped, and a
    curve whose fastest point is among them is refused, as there.  The first rectangle is not
    weighted; trapezoids of weighted accuracy follow.
    """
    ordered = sorted(points)
    if not ordered or best <= 0:
        raise ConfigError("AUP needs points and a best accuracy above 0")
    floor = ordered[0][1] - DROP
    if ordered[-1][1] < floor:
        raise ConfigError(
            f"the fastest point has {ordered[-1][1]:.2f} %, more than {DROP:g} below the slowest: "
            "leave it out, or use dense_aup"
        )
    kept = [(rate, share) for rate, share in ordered if share >= floor]
    area = kept[0][0] * kept[0][1]
    for (rate, share), (next_rate, next_share) in pairwise(kept):
        heights = share * weight(share, best, alpha) + next_share * weight(next_share, best, alpha)
        area += (next_rate - rate) / 2 * heights
    return area


def dense_aup(
    points: Sequence[Point], best: float, alpha: float = ALPHA, start: Point | None = None
) -> float:
    """The same area for a whole sweep: points below the floor are left out wherever they lie.

    ``start``: where the curve begins; points that are not faster are left out.  None (default)
    begins at the slowest of the points.
    """
    ordered = sorted(points)
    if start is not None:
        ordered = [start, *(point for point in ordered if point[0] > start[0])]
    kept = [point for point in ordered if point[1] >= ordered[0][1] - DROP]
    return aup(kept, best, alpha)


@dataclass(frozen=True)
class Outcome:
    """One setting on ``n`` examples: ``right`` (n,) bool, ``tokens`` and ``nfe`` (n,) int."""

    right: Sequence[bool]
    tokens: Sequence[int]
    nfe: Sequence[int]

    def point(self) -> Point:
        """(tokens per forward, percent right)."""
        rate = float(np.sum(self.tokens) / max(1, np.sum(self.nfe)))
        return rate, 100 * float(np.mean(self.right))


def dense_aup_draws(
    outcomes: Sequence[Outcome],
    best: float,
    draws: int = 400,
    seed: int = 0,
    start: Outcome | None = None,
) -> Draws:
    """Dense AUP of (draws,) bootstrap samples of the examples.

    A draw takes the same examples for all settings, as they were measured; and, under the same
    seed, for all methods, so that differences of their areas can be taken draw by draw.
    ``start``: the setting at which the curve begins in every draw, see `dense_aup`.
    """
    outcomes = [*outcomes, *([] if start is None else [start])]
    n = len(outcomes[0].right)
    chosen = np.random.default_rng(seed).integers(0, n, (draws, n))

    def sums(values: Sequence[Sequence[Any]]) -> Draws:
        result: Draws = np.asarray(values, np.float64)[:, chosen].sum(2)
        return result

    rates = sums([o.tokens for o in outcomes]) / np.maximum(1, sums([o.nfe for o in outcomes]))
    shares = 100 / n * sums([o.right for o in outcomes])
    curves = (
        list(zip(x.tolist(), y.tolist(), strict=True))
        for x, y in zip(rates.T, shares.T, strict=True)
    )
    return np.array(
        [dense_aup(curve, best, start=None if start is None else curve[-1]) for curve in curves]
    )


def interval(draws: Draws, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of bootstrap draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
