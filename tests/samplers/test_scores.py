"""Scores that know positions and tokens, against their formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dllm.core.errors import ConfigError
from dllm.samplers.certainty_prior import CertaintyPrior
from dllm.samplers.pc import PC

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


def test_pc_weighs_rare_tokens_and_early_positions(tmp_path: Path) -> None:
    counts = np.array([70, 20, 9, 1, 0])
    np.save(tmp_path / "counts.npy", counts)
    canvas = canvas_of(5, prompt=2)
    canvas.window = (2, 7)
    p, tokens = [0.9, 0.5, 0.5, 0.8, 0.9], [0, 1, 2, 3, 4]
    result = PC(alpha=5, decay=0.25, frequencies=str(tmp_path / "counts.npy")).score(
        canvas, predict(canvas, p, tokens=tokens)
    )
    expected = [
        min(-q * np.log(counts[t] / 100 + 1e-10), 5) * np.exp(-0.25 * i)
        for i, (q, t) in enumerate(zip(p, tokens, strict=True))
    ]
    assert result == pytest.approx(expected, rel=1e-5)
    assert expected[-1] == pytest.approx(5 * np.exp(-1.0))  # alpha caps the surprise


def test_frequencies_that_cannot_serve(tmp_path: Path) -> None:
    canvas = canvas_of(1)
    canvas.window = (0, 1)
    np.save(tmp_path / "short.npy", np.ones(3))
    np.save(tmp_path / "square.npy", np.ones((2, 2)))
    with pytest.raises(ConfigError, match="knows 3 ids, not 7"):
        PC(frequencies=str(tmp_path / "short.npy")).score(
            canvas, predict(canvas, [0.5], tokens=[7])
        )
    with pytest.raises(ConfigError, match="one count per token id"):
        PC(frequencies=str(tmp_path / "square.npy")).score(canvas, predict(canvas, [0.5]))
    with pytest.raises(ConfigError, match="cannot read token frequencies"):
        PC(frequencies=str(tmp_path / "none.npy")).score(canvas, predict(canvas, [0.5]))
