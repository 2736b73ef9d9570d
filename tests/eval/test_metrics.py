"""Metrics against published and hand-computed numbers."""

import math

import numpy as np
import pytest

from dllm.eval.metrics import holm, paired, wilson


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


@pytest.mark.slow
def test_paired_intervals_cover() -> None:
    rng = np.random.default_rng(2)
    inside = []
    for _ in range(600):
        kind = rng.choice(4, 60, p=[0.5, 0.2, 0.1, 0.2])
        result = paired((kind == 0) | (kind == 1), (kind == 0) | (kind == 2))
        inside.append(result.low <= 0.1 <= result.high)
    assert 0.92 < np.mean(inside) < 0.985
