"""What DPad and Streaming-dLLM keep of what lies behind a block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dllm
from dllm.cache import Plan, Slots, compose
from dllm.core.canvas import Canvas, IntArray, Suffix
from dllm.samplers import compose as compose_sampler

from ..samplers.test_vectors import canvas_of, decide, predict
from ..table import hashed, table_model

PROMPT, MASKS, BLOCK = 3, 17, 4


def opened(noise: Any = None) -> Canvas:
    canvas = canvas_of(MASKS, prompt=PROMPT, **({} if noise is None else {"noise": noise}))
    canvas.open_window(PROMPT, PROMPT + BLOCK)
    return canvas


def plan(canvas: Canvas, spec: str, slots: Slots | None = None) -> Plan:
    slots = Slots.empty(canvas.length) if slots is None else slots
    return compose(spec).plan(canvas, slots, canvas.masks())


def test_the_next_masks_and_the_last_one_stay() -> None:
    canvas = opened()
    canvas.give(10, np.array([5]))  # given text stays, too
    read = plan(canvas, "streaming(window=2)").read
    assert read is not None
    assert read.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 19]


@pytest.mark.parametrize(
    ("base", "first", "later"),
    [("none", 10, 10), ("prefix", 10, 7), ("dual", 10, 4)],
)
def test_what_a_step_computes(base: str, first: int, later: int) -> None:
    canvas, slots = opened(), Slots.empty(PROMPT + MASKS)
    cache = compose(f"streaming(window=2, base={base})")
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
        plan(canvas, "dpad(sigma=3, scale=2, window=10)")
        positions = canvas.state(Suffix).positions
        assert positions is not None
        kept[positions - PROMPT - BLOCK] += 1
    far = 3 * np.arange(10) / 9
    density = 2 * np.exp(-(far**2) / 2) / np.sqrt(2 * np.pi)
    assert kept[:10] / 400 == pytest.approx(np.minimum(density, 1), abs=0.08)
    assert not kept[10:].any()


def test_uniform_dropout_keeps_a_number_of_near_positions() -> None:
    canvas = opened(lambda stream, step, at: (at % 5 / 5).astype(np.float32))
    plan(canvas, "dpad(dropout=uniform, number=3, window=8)")
    positions = canvas.state(Suffix).positions
    # of 7 ... 14 those with the smallest numbers: 10 (0), 11 (0.2), 7 (0.4, before 12)
    assert positions is not None and positions.tolist() == [7, 10, 11]


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


def test_the_threshold_falls_with_the_masks() -> None:
    """Masks and positions are counted from the block on: 8 masks of 8, 6 of 8, with 2 behind."""
    canvas, sampler = canvas_of(12), compose_sampler("streaming(0.8, 0.4)+blocks(6)")
    canvas.state(Suffix).positions = np.array([6, 11])
    assert sampler.prepare(canvas)
    row = [0.79, 0.81, 0.82, 0.1, 0.2, 0.3]
    assert decide(sampler, canvas, predict(canvas, row)).committed.tolist() == [1, 2]
    canvas.step, canvas.block_step = 1, 1
    assert sampler.prepare(canvas)
    # 0.8 * (1 - 0.4 * (1 - 6 / 8)) = 0.72
    row = [0.71, 0.725, 0.1, 0.2]
    assert decide(sampler, canvas, predict(canvas, row)).committed.tolist() == [3]
