"""Scores that know positions and tokens, against their formulas."""

from __future__ import annotations

import numpy as np
import pytest

from dllm.samplers.certainty_prior import CertaintyPrior

from .test_vectors import canvas_of, predict


@pytest.mark.parametrize("sigma", [0.5, 3.0, 10.0, 40.0])
def test_the_certainty_prior_is_a_gaussian_density_of_decided_positions(sigma: float) -> None:
    canvas = canvas_of(12, prompt=3)
    canvas.masked[[5, 6, 14]] = False
    canvas.window = (3, 15)
    p = np.linspace(0.1, 0.9, len(canvas.masks())).tolist()

    def decided(position: int) -> float:
        size = canvas.end - canvas.start
        if not canvas.start - size <= position < canvas.end + size:
            return 0.0  # the released code pads with a region on either side
        if position < canvas.start:
            return 1.0
        return float(not canvas.masked[min(position, canvas.end - 1)])

    def density(position: int) -> float:
        reach = range(position - 36, position + 36)  # three regions to either side
        weight = {j: np.exp(-0.5 * ((j - position) / sigma) ** 2) for j in reach}
        return sum(w * decided(j) for j, w in weight.items()) / sum(weight.values())

    result = CertaintyPrior(sigma).score(canvas, predict(canvas, p))
    expected = [q * density(int(at)) for q, at in zip(p, canvas.masks(), strict=True)]
    assert result == pytest.approx(expected, rel=1e-5)
