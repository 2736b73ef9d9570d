"""A row's tokens, commit order, forwards and computed positions are those of decoding it alone,
whatever joins, leaves, waits, fails or runs out of memory meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm
from dllm import cache as caches
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.engine import Engine, MaskedRecipe, Row
from dllm.engine.forward import Forward
from dllm.samplers import compose

from ..decoding import canvas_for
from ..settings import SMALL, every_sampler
from ..thin import some

SETTINGS: tuple[dict[str, Any], ...] = (
    {}, {}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.1, "top_p": 0.8, "seed": 9},
    {"cfg_scale": 0.7}, {"min_new_tokens": 4}, {"top_candidates": 2},
)  # fmt: skip
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"


@dataclass(frozen=True)
class Text:
    """A text to be written: prompt, masks, how."""

    prompt: tuple[int, ...]
    masks: int
    recipe: MaskedRecipe

    def canvas(self, model: dllm.DiffusionModel) -> Canvas:
        return canvas_for(model, self.prompt, self.masks, self.recipe.config.seed)


Outcome = tuple[list[int], list[int], int, int]


def outcome(canvas: Canvas) -> Outcome:
    return canvas.tokens.tolist(), canvas.commit_step.tolist(), canvas.nfe, canvas.computed


def alone(model: dllm.DiffusionModel, cache: str, text: Text) -> Outcome:
    canvas = text.canvas(model)
    for _ in Engine(model, caches.compose(cache)).run([canvas], text.recipe):
        pass
    return outcome(canvas)


def recipes(model: dllm.DiffusionModel, cache: str) -> list[MaskedRecipe]:
    """Every sampler that goes with the cache, each with one of the settings it allows."""
    result = []
    for i, spec in enumerate(every_sampler()):
        for options in (SETTINGS[i % len(SETTINGS)], {}):
            try:
                sampler = compose(spec, stop_ids=model.facts.stop_token_ids)
                recipe = MaskedRecipe(sampler, config=GenerationConfig(**options))
                Engine(model, caches.compose(cache)).check(recipe)
            except dllm.ConfigError:
                continue
            result.append(recipe)
            break
    return result


def texts_of(model: dllm.DiffusionModel, cache: str, count: int, seed: int) -> list[Text]:
    rng = np.random.default_rng(seed)
    known = recipes(model, cache)
    return [
        Text(tuple(rng.integers(5, 40, rng.integers(1, 9)).tolist()), int(rng.integers(4, 17)),
             known[rng.integers(len(known))])
        for _ in range(count)
    ]  # fmt: skip


def turmoil(model: dllm.DiffusionModel, cache: str, texts: list[Text], seed: int) -> None:
    """Rows arrive at random steps, some are dropped, some are left out of a step; the pool holds
    two or three of them."""
    rng = np.random.default_rng(seed)
    sizes = [
        text.recipe.lanes * text.recipe.width * (len(text.prompt) + text.masks) for text in texts
    ]
    engine = Engine(model, caches.compose(cache), slots=max(2 * max(sizes), 60), max_batch_size=4)
    left, rows, canvases = list(range(len(texts))), dict[int, Row](), dict[int, Canvas]()
    dropped: set[int] = set()
    while left or rows:
        while left and rng.random() < 0.5:
            canvas = text_canvas = canvases.setdefault(left[0], texts[left[0]].canvas(model))
            row = engine.admit(canvas, texts[left[0]].recipe)
            if row is None:
                break
            assert text_canvas is row.canvas
            rows[left.pop(0)] = row
        if rows and rng.random() < 0.08:
            victim = int(rng.choice(list(rows)))
            engine.drop(rows.pop(victim))
            dropped.add(victim)
        chosen = [row for row in rows.values() if rng.random() < 0.8]
        engine.step(chosen)
        for i, row in list(rows.items()):
            assert row.error is None
            if row.canvas.finished:
                del rows[i]
        if engine.forward.buffer is not None:
            assert engine.used == engine.forward.buffer.extents.used <= engine.positions
    assert engine.used == 0 and not engine.live
    for i, canvas in canvases.items():
        if i not in dropped:
            assert outcome(canvas) == alone(model, cache, texts[i]), texts[i].recipe.sampler.spec


CACHES = [*SMALL]
Models = Callable[[str], dllm.DiffusionModel]


@pytest.fixture(scope="session")
def models(tiny: dllm.DiffusionModel, reordered: dllm.DiffusionModel) -> Models:
    """The model that a cache is for."""
    facts = replace(tiny.facts, block_length=4, mask_kind="block_causal")
    own = {"wedlm": reordered, "block": replace(tiny, facts=facts)}
    return lambda name: own.get(name, tiny)


@pytest.mark.parametrize("name", some(CACHES, 4))
def test_rows_are_what_they_are_alone(models: Models, name: str) -> None:
    model = models(name)
    turmoil(model, SMALL[name], texts_of(model, SMALL[name], 3, seed=1), seed=2)


def test_rows_are_what_they_are_alone_where_decided_tokens_come_first(
    reordered: dllm.DiffusionModel,
) -> None:
    turmoil(reordered, "none", texts_of(reordered, "none", 5, seed=1), seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_rows_are_what_they_are_alone_in_any_order(models: Models, name: str, seed: int) -> None:
    model = models(name)
    turmoil(model, SMALL[name], texts_of(model, SMALL[name], 12, seed), seed + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_every_sampler_beside_every_other(models: Models, name: str) -> None:
    """All samplers that go with the cache, in one engine at a time."""
    cache, model = SMALL[name], models(name)
    texts = [Text((7, 9, 11 + i % 5), 12 + i % 4, r) for i, r in enumerate(recipes(model, cache))]
    turmoil(model, cache, texts, seed=3)


def test_a_step_that_was_left_out_is_not_planned_again(tiny: dllm.DiffusionModel) -> None:
    text = texts_of(tiny, "dual", 1, seed=4)[0]
    engine = Engine(tiny, caches.compose("dual"))
    row = engine.admit(text.canvas(tiny), text.recipe)
    assert row is not None
    engine.plan([row])
    jobs = row.jobs
    assert jobs and engine.step([]) == [] and engine.plan() == [row]
    assert row.jobs is jobs and row.cost == sum(job.size for job in jobs)
    engine.step()
    assert row.jobs is not jobs


def test_a_row_that_can_never_fit_is_refused(tiny: dllm.DiffusionModel) -> None:
    engine = Engine(tiny, caches.compose("dual"), slots=20)
    text = Text((1, 2, 3), 30, MaskedRecipe(compose("threshold")))
    with pytest.raises(dllm.ConfigError, match="needs 33 positions"):
        engine.admit(text.canvas(tiny), text.recipe)


def test_two_calls_on_one_engine_do_not_tread_on_one_another(tiny: dllm.DiffusionModel) -> None:
    texts = texts_of(tiny, "dkv(refresh_every=4)", 2, seed=6)
    engine = Engine(tiny, caches.compose("dkv(refresh_every=4)"))
    canvases = [text.canvas(tiny) for text in texts]
    calls = [engine.run([c], t.recipe) for c, t in zip(canvases, texts, strict=True)]
    while calls:
        calls = [call for call in calls if next(call, None) is not None]
    for canvas, text in zip(canvases, texts, strict=True):
        assert outcome(canvas) == alone(tiny, "dkv(refresh_every=4)", text)
    assert engine.used == 0


def test_a_call_that_is_given_up_leaves_nothing_behind(tiny: dllm.DiffusionModel) -> None:
    text = texts_of(tiny, "dual", 1, seed=7)[0]
    engine = Engine(tiny, caches.compose("dual"))
    running = engine.run([text.canvas(tiny) for _ in range(3)], text.recipe)
    next(running)
    assert engine.used
    running.close()
    assert not engine.live and engine.used == 0


# -- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["none", "dual", "elastic", "dllm_cache(6, 3)"])
def test_out_of_memory_takes_back_one_row_and_changes_nothing(
    tiny: dllm.DiffusionModel, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of more than 40 positions do not fit: rows wait for one another, and all are right."""
    launch = Forward.launch

    def narrow(self: Forward, jobs: list[Any]) -> Any:
        if sum(job.size for job in jobs) > 40:
            if self.cache.layerwise:  # fails on its way through the layers
                launch(self, jobs)
            raise RuntimeError(NO_MEMORY)
        return launch(self, jobs)

    texts = [Text((5, 6, 7, 8 + i), 12, MaskedRecipe(compose("threshold(0.3)"))) for i in range(5)]
    expected = [alone(tiny, cache, text) for text in texts]
    monkeypatch.setattr(Forward, "launch", narrow)
    engine = Engine(tiny, caches.compose(cache))
    rows = [engine.admit(text.canvas(tiny), text.recipe) for text in texts]
    while any(row is not None and not row.canvas.finished for row in rows):
        engine.step()
    assert [outcome(row.canvas) for row in rows if row is not None] == expected
    assert sum(row.restarts for row in rows if row is not None) > 0
    assert not engine.live and engine.used == 0


def test_what_fits_nowhere_fails_alone(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Forward.launch

    def narrow(self: Forward, jobs: list[Any]) -> Any:
        if any(job.canvas.length > 40 for job in jobs):
            raise RuntimeError(NO_MEMORY)
        return launch(self, jobs)

    monkeypatch.setattr(Forward, "launch", narrow)
    engine, recipe = Engine(tiny, caches.compose("none")), MaskedRecipe(compose("threshold(0.3)"))
    small, large = Text((5, 6), 12, recipe), Text((5, 6), 50, recipe)
    rows = [engine.admit(text.canvas(tiny), recipe) for text in (small, large, small)]
    assert all(row is not None for row in rows)
    while any(row is not None and not row.canvas.finished for row in rows):
        engine.step()
    errors = [row.error for row in rows if row is not None]
    assert errors[0] is None and errors[2] is None
    assert isinstance(errors[1], dllm.OutOfMemoryError) and "max_batch_tokens" in str(errors[1])
    assert not engine.live


def test_a_row_that_fails_takes_nobody_with_it(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network raises whenever one certain row is in the forward."""
    launch = Forward.launch

    def faulty(self: Forward, jobs: list[Any]) -> Any:
        if any(job.canvas.prompt_length == 3 for job in jobs):
            raise ZeroDivisionError("a kernel gave up")
        return launch(self, jobs)

    recipe = MaskedRecipe(compose("threshold(0.3)"))
    texts = [Text(prompt, 12, recipe) for prompt in ((5, 6), (5, 6, 7), (8,))]
    expected = [alone(tiny, "dual", text) for text in texts]
    monkeypatch.setattr(Forward, "launch", faulty)
    engine = Engine(tiny, caches.compose("dual"))
    rows = [engine.admit(text.canvas(tiny), recipe) for text in texts]
    while engine.live:
        engine.step()
    assert [row.error is None for row in rows if row is not None] == [True, False, True]
    assert [outcome(row.canvas) for row in rows if row is not None][::2] == expected[::2]
    assert engine.used == 0


@pytest.mark.parametrize("cache", ["dual", "elastic"])
def test_rows_that_fail_only_together_go_apart(
    tiny: dllm.DiffusionModel, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Forward.launch

    def faulty(self: Forward, jobs: list[Any]) -> Any:
        if len({id(job.row) for job in jobs}) > 1:
            raise ZeroDivisionError("a kernel gave up")
        return launch(self, jobs)

    texts = [Text((5, 6, 7 + i), 12, MaskedRecipe(compose("threshold(0.3)"))) for i in range(3)]
    expected = [alone(tiny, cache, text) for text in texts]
    monkeypatch.setattr(Forward, "launch", faulty)
    engine = Engine(tiny, caches.compose(cache))
    rows = [engine.admit(text.canvas(tiny), text.recipe) for text in texts]
    for _ in range(100):
        engine.step()
    assert [outcome(row.canvas) for row in rows if row is not None] == expected


def test_numbers_that_are_not_finite_are_an_error(tiny_folder: Any) -> None:
    model = dllm.load(tiny_folder)
    with torch.no_grad():
        model.hf.base_model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    for how in ({}, {"regex": "[a-c]+"}, {"sampler": "llada", "top_p": 0.9, "temperature": 1.0}):
        with pytest.raises(dllm.NumericError, match="not finite"):
            dllm.generate(model, "Tom has 3 apples.", max_new_tokens=4, **how)


# -- threads and memory -------------------------------------------------------------------------


def test_the_shared_network_is_left_as_it_is(tiny: dllm.DiffusionModel) -> None:
    layers = list(tiny.backbone.layers)  # type: ignore[arg-type, call-overload]
    before = [dict(layer.__dict__) for layer in layers]
    steps = dllm.stream(tiny, "x", cache="elastic", max_new_tokens=8)
    next(steps)
    assert [layer.__dict__ for layer in layers] == before
    assert list(tiny.backbone.layers) == layers  # type: ignore[arg-type, call-overload]
    steps.close()  # type: ignore[attr-defined]
