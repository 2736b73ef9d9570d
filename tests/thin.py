"""Products of settings, most of which only ``-m slow`` runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


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
