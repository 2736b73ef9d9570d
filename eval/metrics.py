"""What a sweep is summed up with: intervals and paired tests."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ..core.errors import ConfigError

LEVEL = 0.95  # of all intervals
Z95 = NormalDist().inv_cdf((1 + LEVEL) / 2)
DROP = 5.0  # points of accuracy below the slowest setting at which a setting no longer counts


def wilson(right: int, n: int) -> tuple[float, float]:
    """Wilson score interval of a share (Wilson 1927): ``right`` of ``n``, as shares in [0, 1]."""
    if n < 1:
        raise ConfigError("an interval needs at least one example")
    share, extra = right / n, Z95 * Z95 / n
    middle = (share + extra / 2) / (1 + extra)
    reach = math.sqrt(extra * (share * (1 - share) + extra / 4)) / (1 + extra)
    return max(0.0, middle - reach) if right else 0.0, middle + reach if right < n else 1.0


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


def paired(a: Sequence[bool], b: Sequence[bool]) -> Paired:
    """Compare two methods example by example; the interval is Tango's score interval (1998),
    which stays honest where they never differ."""
    if len(a) != len(b) or not len(a):
        raise ConfigError(f"paired results have one length, not {len(a)} and {len(b)}")
    x, y = np.asarray(a, bool), np.asarray(b, bool)
    only_a, only_b, n = int((x & ~y).sum()), int((~x & y).sum()), len(x)
    low, high = _tango(only_a, only_b, n)
    differ = only_a + only_b
    tail = sum(math.comb(differ, i) for i in range(min(only_a, only_b) + 1))
    p_value = min(1.0, 2 * tail / 2**differ)
    return Paired((only_a - only_b) / n, low, high, p_value, only_a, only_b)


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


def _tango(only_a: int, only_b: int, n: int) -> tuple[float, float]:
    """All differences that a score test does not reject."""

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
    low = -1.0 if score(-1.0) <= Z95 else _border(lambda d: score(d) > Z95, -1.0, seen)
    high = 1.0 if score(1.0) >= -Z95 else _border(lambda d: score(d) < -Z95, 1.0, seen)
    return low, high


def _border(outside: Callable[[float], bool], out: float, within: float) -> float:
    """Where ``outside`` ceases to hold between two differences, to the last bits."""
    for _ in range(60):
        middle = (out + within) / 2
        out, within = (middle, within) if outside(middle) else (out, middle)
    return within
