"""Products of settings, most of which only ``-m slow`` runs."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def covering(*axes: Sequence[Any]) -> list[Any]:
    """The product of ``axes`` as parameters: each value of each axis stands in some that the
    default run takes; all the others are slow."""
    length = max(map(len, axes))
    taken = {tuple(i % len(axis) for axis in axes) for i in range(length)}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, place, strict=True)),
            marks=() if place in taken else pytest.mark.slow,
        )
        for place in product(*(range(len(axis)) for axis in axes))
    ]


def some(values: Iterable[Any], count: int) -> list[Any]:
    """``values`` as parameters, tuples as several: the default run takes ``count`` of them, evenly
    spaced; the others are slow."""
    every = list(values)
    taken = {round(i * len(every) / count) for i in range(count)}
    rest = [pytest.mark.slow]
    return [
        pytest.param(*value.values, id=value.id, marks=[*value.marks, *(rest * (i not in taken))])
        if isinstance(value, ParameterSet)
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=rest * (i not in taken)
        )
        for i, value in enumerate(every)
    ]


def slow(*axes: Sequence[Any]) -> list[Any]:
    """The product of ``axes`` as parameters, all of them slow."""
    return [pytest.param(*values, marks=pytest.mark.slow) for values in product(*axes)]
