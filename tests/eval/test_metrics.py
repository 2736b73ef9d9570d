"""Metrics against published and hand-computed numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dllm.core.errors import ConfigError
from dllm.eval.metrics import (
    Outcome,
    aup,
    dense_aup,
    dense_aup_draws,
    holm,
    interval,
    paired,
    weight,
    wilson,
)


@pytest.mark.parametrize(
    ("points", "area"),
    [([(1, 74.79), (2.77, 74.68)], 205.78), ([(1, 74.02), (9.11, 73.09)], 637.65)],
)
def test_aup_gives_the_published_values(points: list[tuple[float, float]], area: float) -> None:
    assert aup(points, 74.98) == pytest.approx(area, abs=0.005)
    assert aup(points[::-1], 74.98) == aup(points, 74.98)


def test_aup_leaves_out_what_is_too_wrong() -> None:
    kept = [(1.0, 70.0), (3.0, 69.0)]
    assert aup([*kept, (2.0, 60.0)], 70) == aup(kept, 70)
    with pytest.raises(ConfigError, match="fastest point"):
        aup([*kept, (4.0, 60.0)], 70)
    assert dense_aup([*kept, (4.0, 60.0)], 70) == aup(kept, 70)
    assert aup([(2.0, 50.0)], 80) == 100.0  # the first rectangle is not weighted


def test_weights_fall_with_the_distance_to_the_best() -> None:
    assert weight(80, 80) == 1 and weight(81, 80) == 1
    assert weight(40, 80) == pytest.approx(math.exp(-1.5))


def test_the_interval_of_an_area_covers_it() -> None:
    rng = np.random.default_rng(0)
    n, outcomes = 800, []
    for rate, share in ((1, 0.9), (2, 0.89), (4, 0.88)):
        outcomes.append(Outcome(rng.random(n) < share, np.full(n, 20), np.full(n, 20 // rate)))
    area = dense_aup([o.point() for o in outcomes], 100.0)
    low, high = interval(dense_aup_draws(outcomes, 100.0))
    assert low < area < high
    few = [Outcome(o.right[:40], o.tokens[:40], o.nfe[:40]) for o in outcomes]
    wide = interval(dense_aup_draws(few, 100.0))
    assert wide[1] - wide[0] > high - low


def test_draws_are_paired() -> None:
    """The same examples for every method: a method that is always 10 % faster is so in each."""
    rng = np.random.default_rng(3)
    right, tokens = rng.random(50) < 0.8, rng.integers(5, 15, 50)
    slow, fast = Outcome(right, tokens, 10 * tokens), Outcome(right, tokens, 9 * tokens)
    ratio = dense_aup_draws([fast], 90.0) / dense_aup_draws([slow], 90.0)
    assert ratio == pytest.approx(10 / 9) and np.ptp(dense_aup_draws([slow], 90.0)) > 0
    assert (dense_aup_draws([slow], 90.0, seed=1) != dense_aup_draws([slow], 90.0)).any()


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(10, 20, 0.2993, 0.7007), (0, 10, 0.0, 0.2775), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_intervals_are_those_of_the_books(
    right: int, n: int, low: float, high: float
) -> None:
    assert wilson(right, n) == pytest.approx((low, high), abs=5e-4)


def test_wilson_intervals_cover() -> None:
    rng = np.random.default_rng(1)
    right = rng.binomial(50, 0.9, 4000)
    intervals = {k: wilson(int(k), 50) for k in set(right.tolist())}
    inside = [intervals[k][0] <= 0.9 <= intervals[k][1] for k in right.tolist()]
    assert 0.92 < np.mean(inside) < 0.98


def test_paired_comparison() -> None:
    a = [True] * 12 + [False] * 2 + [True] * 6
    b = [False] * 12 + [True] * 2 + [True] * 6
    result = paired(a, b)
    assert (result.only_a, result.only_b, result.difference) == (12, 2, 0.5)
    assert result.p_value == pytest.approx(2 * sum(math.comb(14, k) for k in range(3)) / 2**14)
    assert result.low < 0.5 < result.high <= 1
    assert paired(b, a).low == pytest.approx(-result.high, abs=1e-6)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 1), (5, 5), (1, 7), (121, 59), (900, 1100)])
def test_mcnemar_is_the_exact_binomial_test(only_a: int, only_b: int) -> None:
    scipy = pytest.importorskip("scipy.stats")
    a = [True] * only_a + [False] * only_b + [True]
    b = [False] * only_a + [True] * only_b + [True]
    expected = scipy.binomtest(only_a, only_a + only_b, 0.5).pvalue
    assert paired(a, b).p_value == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_the_literature() -> None:
    """One pair against seven (Fagerland, Lydersen and Laake 2013): 0.070."""
    assert paired([True] + [False] * 7, [False] + [True] * 7).p_value == pytest.approx(
        0.0703, abs=1e-4
    )


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([0.02]) == [0.02] and holm([]) == []


def test_holm_keeps_the_chance_of_any_false_claim() -> None:
    rng = np.random.default_rng(4)
    noise, one_real = rng.random((2000, 20)), np.full(20, 1e-4)
    assert 0.035 < np.mean([min(holm(list(p))) < 0.05 for p in noise]) < 0.065
    some = noise[0].copy()
    some[7] = one_real[7]
    assert [i for i, p in enumerate(holm(list(some))) if p < 0.05] == [7]


def test_methods_that_never_differ_may_still_do_so() -> None:
    same = paired([True] * 40, [True] * 40)
    assert (same.difference, same.p_value) == (0.0, 1.0)
    assert same.low == pytest.approx(-same.high) and 0.05 < same.high < 0.12


def test_paired_intervals_cover() -> None:
    rng = np.random.default_rng(2)
    inside = []
    for _ in range(600):
        kind = rng.choice(4, 60, p=[0.5, 0.2, 0.1, 0.2])
        result = paired((kind == 0) | (kind == 1), (kind == 0) | (kind == 2))
        inside.append(result.low <= 0.1 <= result.high)
    assert 0.92 < np.mean(inside) < 0.985
