"""Numbers within bounds, and multiples: every text against the number that it writes."""

from fractions import Fraction

import numpy as np
import pytest

from dllm.structured.byte_automaton import Budget
from dllm.structured.numbers import numbers

from ..thin import some


@pytest.mark.parametrize("seed", some(range(4), 1))
def test_decimals_within_bounds_that_have_a_point(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(40):
        low, high = sorted((rng.integers(-400, 400, 2) / 100).tolist())
        above, below = bool(rng.integers(2)), bool(rng.integers(2))
        if high - low < 0.02:
            continue
        decimal = numbers(low, high, above, below, None, False, Budget())
        for x in (*(rng.integers(-500, 500, 25) / 100).tolist(), low, high):
            inside = low < x < high or (x == low and not above) or (x == high and not below)
            for text in (f"{x:.2f}", f"{x:.4f}", str(x)):
                assert decimal.accepts(text.encode()) == inside, (low, high, above, below, text)


def test_numbers_within_bounds() -> None:
    """Every bound against every number near it."""
    rng = np.random.default_rng(3)
    for _ in range(100):
        low, high = sorted(int(x) for x in rng.integers(-130, 1200, 2))
        above, below = bool(rng.integers(2)), bool(rng.integers(2))
        lower, upper = (None if rng.random() < 0.2 else x for x in (low, high))
        if high - low < 3:
            continue
        whole = numbers(lower, upper, above, below, None, True, Budget())
        decimal = numbers(lower, upper, above, below, None, False, Budget())
        near = {low - 1, low, low + 1, high - 1, high, high + 1, 0, -1, 1, 9, 10, 99, 100, 1000}
        for x in (*near, *(int(n) for n in rng.integers(-1500, 1500, 20))):
            inside = (lower is None or x > lower or (x == lower and not above)) and (
                upper is None or x < upper or (x == upper and not below)
            )
            text = str(x).encode()
            assert whole.accepts(text) == inside, (lower, upper, above, below, x)
            assert decimal.accepts(text) == inside, (lower, upper, above, below, x)
            y = x + (0.5 if x >= 0 else -0.5)
            between = (lower is None or y > lower) and (upper is None or y < upper)
            text = str(y).encode()
            assert decimal.accepts(text) == between, (lower, upper, above, below, y)
            assert not whole.accepts(text)


@pytest.mark.parametrize("step", [1, 7, 0.25, 1.5, 0.01])
def test_multiples(step: float) -> None:
    size = Fraction(str(step))
    every = numbers(None, None, False, False, step, False, Budget())
    whole = numbers(None, None, False, False, step, True, Budget())
    for text in (
        *map(str, range(-30, 30)),
        "0.5",
        "-1.50",
        "0.250",
        "0.07",
        "3.0",
        "2.125",
        "-0.0",
    ):
        if text == "-0":
            continue
        right = (Fraction(text) / size).denominator == 1
        assert every.accepts(text.encode()) == right, text
        assert whole.accepts(text.encode()) == (right and "." not in text), text
