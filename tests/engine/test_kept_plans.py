"""Plans that hold for several steps change nothing: an engine that keeps them and a twin that makes
every one anew go through the same turmoil, and every row ends with the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import dllm
from dllm import cache as caches
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.engine import Engine, MaskedRecipe, Row, turn
from dllm.engine.forward import Forward
from dllm.samplers import compose

from ..conftest import small
from ..decoding import canvas_for
from ..thin import some

SAMPLERS = (
    "threshold(0.05)", "fixed(2)", "localleap(0.05, 0.02)", "llada", "dsb(8)", "dcd(s_init=4)",
    "threshold(0.05)+blocks(8)+append(block=8)", "threshold(0.05)+append(block=4, lookahead=0)",
    "lopa(fixed(2), k=2)", "freedave(fixed(1), draft_depth=3)", "edit(0.1)", "remdm(n=2)",
    "threshold(0.05)+r2", "daedal(initial=4, expand=3)",
)  # fmt: skip


@contextmanager
def nothing_is_kept() -> Iterator[None]:
    """Plans and layouts of the last step are forgotten."""
    forgets: Any = property(lambda self: None, lambda self, value: None)
    with patch.object(turn, "may_repeat", lambda *_: False), \
         patch.object(Forward, "_last", forgets, create=True):  # fmt: skip
        yield


def texts(model: dllm.DiffusionModel, cache: str, rng: np.random.Generator) -> list[Any]:
    """(canvas, recipe) of texts that the cache serves."""
    result: list[Any] = []
    engine, facts = Engine(model, caches.compose(cache)), model.facts
    while len(result) < 9:
        spec, seed = SAMPLERS[rng.integers(len(SAMPLERS))], int(rng.integers(1000))
        known = {"eos_token_id": facts.eos_token_id, "block_length": 8}
        sampler = compose(spec, stop_ids=facts.stop_token_ids, facts=known)
        config = GenerationConfig(temperature=float(rng.choice([0, 0.9])), seed=seed)
        recipe = MaskedRecipe(sampler, config=config)
        prompt, room = rng.integers(5, 40, rng.integers(1, 9)), int(rng.integers(8, 33))
        try:
            engine.check(recipe)
        except dllm.ConfigError:
            continue
        begun = (
            room if sampler.length is None else sampler.length.open(len(prompt), len(prompt), room)
        )
        canvas = canvas_for(model, prompt, begun, seed)
        canvas.cap = room
        result.append((canvas, recipe))
    return result


def turmoil(model: dllm.DiffusionModel, cache: str, seed: int) -> tuple[list[Any], int]:
    """Rows join, wait, are left out of steps, are dropped, grow, begin again where the pool is
    full, and are given other texts; what became of each, and how many plans were kept."""
    rng, kept = np.random.default_rng(seed), 0
    waiting = texts(model, cache, rng)
    canvases = [canvas for canvas, _ in waiting]
    engine = Engine(model, caches.compose(cache), slots=40, most=260, max_batch_size=4)
    rows = list[Row]()
    while waiting or rows:
        if waiting and rng.random() < 0.6:
            row = engine.admit(*waiting[0], held=bool(rng.random() < 0.3))
            if row is not None:
                rows.append(row)
                waiting.pop(0)
        if rows and rng.random() < 0.05:
            engine.drop(rows.pop(rng.integers(len(rows))))
        engine.step([row for row in rows if rng.random() < 0.85])
        kept += sum(row.same_as_before is not None for row in rows)
        for row in list(rows):
            assert row.error is None, row.error
            if row.canvas.finished and row.held and rng.random() < 0.5 and row in engine.live:
                canvas = Canvas.for_prompt(
                    rng.integers(5, 40, 2), row.capacity - 2, mask_id=row.canvas.mask_id,
                    pad_id=row.canvas.pad_id, noise=row.canvas.noise,
                )  # fmt: skip
                canvas.cap, row.held = row.capacity - 2, False
                engine.replace(row, canvas, 0)
                canvases.append(canvas)
            elif row.canvas.finished:
                engine.drop(row)
                rows.remove(row)
    return [
        (
            c.tokens.tolist(),
            c.commit_step.tolist(),
            c.nfe,
            c.computed,
            c.logprob.tobytes(),
            c.forced,
        )
        for c in canvases
    ], kept


@pytest.mark.parametrize(
    ("cache", "seed"), some(product(["none", "dual", "prefix", "dkv", "dpad"], range(2)), 1)
)
def test_what_is_kept_changes_nothing(tiny: dllm.DiffusionModel, cache: str, seed: int) -> None:
    found, kept = turmoil(tiny, cache, seed)
    with nothing_is_kept():
        expected, none = turmoil(tiny, cache, seed)
    assert found == expected
    assert none == 0 and (kept > 0 or cache in ("dkv", "dpad"))


def test_what_a_step_adds_to_a_plan_is_not_kept() -> None:
    """Logits of Dream are shifted: the row before a block scores its first token, while that is
    open.  Later steps leave the row alone."""
    model = small("Qwen2ForCausalLM", "dream")

    def counts() -> tuple[list[int], int]:
        result = dllm.generate(model, [5, 6, 7], sampler="fixed(2)", cache="dual", seed=1,
                               max_new_tokens=16, block_length=8, eos_policy="none")  # fmt: skip
        return result.tokens, result.computed

    found = counts()
    with nothing_is_kept():
        assert counts() == found


def test_a_schedule_keeps_the_plan_of_a_block(tiny: dllm.DiffusionModel) -> None:
    """Two plans per block: the refresh that opens it, and one for the steps behind it."""
    with patch.object(turn, "plan_of", wraps=turn.plan_of) as made:
        dllm.generate(tiny, [5, 6, 7], sampler="llada", cache="dual", max_new_tokens=16,
                      block_length=8, eos_policy="none")  # fmt: skip
    assert made.call_count == 4


@pytest.mark.slow
def test_a_plan_that_is_kept_too_long_is_found(tiny: dllm.DiffusionModel) -> None:
    """The test above sees a row whose plan is kept although its window has moved on."""
    with patch.object(turn, "_repeats", lambda row, job: True):
        try:
            found = turmoil(tiny, "dual", 0)[0]
        except Exception:  # rows that decide nothing, slots of a text that is gone
            return
    assert found != turmoil(tiny, "dual", 0)[0]
