"""What DPad keeps of what lies behind a block."""

from typing import Any

import numpy as np
import pytest

import dllm
from dllm.cache import Plan, Slots, compose
from dllm.cache.dpad import Suffix
from dllm.core.canvas import Canvas, IntArray

from ..samplers.test_vectors import canvas_of
from ..table import hashed, table_model

PROMPT, MASKS, BLOCK = 3, 17, 4


def opened(noise: Any = None) -> Canvas:
    canvas = canvas_of(MASKS, prompt=PROMPT, **({} if noise is None else {"noise": noise}))
    canvas.open_window(PROMPT, PROMPT + BLOCK)
    return canvas


def plan(canvas: Canvas, spec: str, slots: Slots | None = None) -> Plan:
    slots = Slots.empty(canvas.length) if slots is None else slots
    return compose(spec).plan(canvas, slots, canvas.masks())


def test_given_text_stays() -> None:
    canvas = opened(lambda stream, step, at: (at / 99).astype(np.float32))
    canvas.give(10, np.array([5]))
    read = plan(canvas, "dpad(number=0, dropout=uniform)").read
    assert read is not None
    assert read.tolist() == [0, 1, 2, 3, 4, 5, 6, 10]


def test_the_last_of_a_window_of_two_is_sigma_away() -> None:
    """Its share is 2 exp(-2) / sqrt(2 pi) = 0.11, that of the first 0.80."""
    canvas = opened(lambda stream, step, at: np.full(len(at), 0.3, np.float32))
    read = plan(canvas, "dpad(sigma=2, scale=2, window=2)").read
    assert read is not None and read.tolist() == [*range(PROMPT + BLOCK + 1)]


def test_any_finite_sigma_is_a_number() -> None:
    """With the largest nothing but the next position has a share."""
    canvas = opened(lambda stream, step, at: np.full(len(at), 0.3, np.float32))
    for sigma in ("1e9", str(2**64)):
        read = plan(canvas, f"dpad(sigma={sigma})").read
        assert read is not None and read.tolist() == [*range(PROMPT + BLOCK + 1)]
    with pytest.raises(dllm.ConfigError, match="sigma must be finite"):
        compose("dpad(sigma=inf)")


@pytest.mark.parametrize(
    ("base", "first", "later"),
    [("none", 10, 10), ("prefix", 10, 7), ("dual", 10, 4)],
)
def test_what_a_step_computes(base: str, first: int, later: int) -> None:
    canvas = opened(lambda stream, step, at: (at % 5 / 5).astype(np.float32))
    slots = Slots.empty(PROMPT + MASKS)
    cache = compose(f"dpad(dropout=uniform, number=3, base={base})")
    opening = cache.plan(canvas, slots, canvas.masks())
    canvas.block_step += 1
    after = cache.plan(canvas, slots, canvas.masks())
    assert [len(opening.compute), len(after.compute)] == [first, later]
    assert opening.read is not None and after.read is not None
    assert opening.read.tolist() == after.read.tolist()


def test_the_farther_away_the_fewer_stay() -> None:
    """Shares over many draws against the density."""
    kept = np.zeros(MASKS - BLOCK)
    for seed in range(400):
        numbers = np.random.default_rng(seed)

        def noise(stream: int, step: int, at: IntArray, numbers: Any = numbers) -> Any:
            return numbers.random(len(at)).astype(np.float32)

        canvas = opened(noise)
        slots = Slots.empty(canvas.length)
        plan(canvas, "dpad(sigma=3, scale=2, window=10)", slots)
        positions = slots.state(Suffix).positions
        kept[positions - PROMPT - BLOCK] += 1
    far = 3 * np.arange(10) / 9
    density = 2 * np.exp(-(far**2) / 2) / np.sqrt(2 * np.pi)
    assert kept[:10] / 400 == pytest.approx(np.minimum(density, 1), abs=0.08)
    assert not kept[10:].any()


def test_uniform_dropout_keeps_a_number_of_near_positions() -> None:
    canvas = opened(lambda stream, step, at: (at % 5 / 5).astype(np.float32))
    slots = Slots.empty(canvas.length)
    plan(canvas, "dpad(dropout=uniform, number=3, window=8)", slots)
    positions = slots.state(Suffix).positions
    # of 7 ... 14 those with the smallest numbers: 10 (0), 11 (0.2), 7 (0.4, before 12)
    assert positions.tolist() == [7, 10, 11]


def test_what_is_kept_is_drawn_once_per_block() -> None:
    model = table_model(hashed(3))
    result = dllm.generate(
        model, [1, 2, 3], sampler="fixed", cache="dpad(window=8, base=none)", max_new_tokens=16,
        block_length=4, eos_policy="none", trace=True,
    )  # fmt: skip
    assert result.trace is not None
    by_block: dict[tuple[int, int], set[str]] = {}
    for step in result.trace.steps:
        by_block.setdefault(step.window, set()).add(str(step.compute))
    assert [len(read) for read in by_block.values()] == [1] * 4
    again = dllm.generate(
        model, [1, 2, 3], sampler="fixed", cache="dpad(window=8, base=none)", max_new_tokens=16,
        block_length=4, eos_policy="none", seed=1, trace=True,
    )  # fmt: skip
    assert again.trace is not None
    assert [s.compute for s in again.trace.steps] != [s.compute for s in result.trace.steps]
