"""Texts whose length is found while they are written."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.core.canvas import Canvas, Edit, moved
from dllm.engine.kv import KVBuffer
from dllm.engine.recipe import MaskedRecipe

from ..golden.conftest import goldens_dir
from ..thin import covering, some

PROMPTS = [[5, 9, 17, 40, 3], [7], [100, 23, 54, 54, 61, 9, 33, 200, 14, 15, 8]]


def tiny(name: str, **facts: Any) -> dllm.DiffusionModel:
    return dllm.load(Path(goldens_dir()) / name, **facts)


def outcome(result: dllm.Result) -> tuple[Any, ...]:
    return result.tokens, result.order, result.nfe, result.finish_reason, result.text


# -- edits ------------------------------------------------------------------------------------


def canvas(text: str, prompt: int = 1) -> Canvas:
    """Digits are decided tokens, ``.`` is a mask."""
    tokens = np.array([9 if letter == "." else int(letter) for letter in text])
    masked = np.array([letter == "." for letter in text])
    result = Canvas(tokens, masked, prompt, prompt, len(text), mask_id=9, pad_id=0)
    result.given[prompt:] = False
    result.text_floor = prompt
    return result


@pytest.mark.parametrize(
    ("edit", "after", "window"),
    [
        (Edit(6, 0, 2), "12.4....", (1, 4)),
        (Edit(6, 0, 2, 7), "12.4..77", (1, 4)),
        (Edit(4, 2, 0), "12.4", (1, 4)),
        (Edit(2, 4, 0), "12", (1, 2)),
        (Edit(2, 1, 3), "12...4..", (1, 4)),
        (Edit(2, 1, 0), "124..", (1, 4)),
    ],
)
def test_an_edit_changes_the_length(edit: Edit, after: str, window: tuple[int, int]) -> None:
    row, expected = canvas("12.4.."), canvas(after)
    row.commit_step[:2] = 0
    row.window = (1, 4)
    row.edit(edit)
    assert np.where(row.masked, 9, row.tokens).tolist() == expected.tokens.tolist()
    assert row.masked.tolist() == expected.masked.tolist()
    assert (row.end, row.length, row.region) == (len(after), len(after), (1, len(after)))
    assert row.window == window
    arrays = row.tokens, row.given, row.commit_step, row.logprob
    assert {len(array) for array in arrays} == {len(after)}
    assert row.commit_step[0] == 0


def test_a_begun_answer_counts_among_its_fewest_tokens() -> None:
    rule = SimpleNamespace(open=lambda start, origin, cap: start)
    recipe: Any = SimpleNamespace(sampler=SimpleNamespace(length=rule),
                                  config=SimpleNamespace(min_new_tokens=12))  # fmt: skip
    facts: Any = SimpleNamespace(mask_kind="bidirectional")
    lengths = [MaskedRecipe.first_length(recipe, facts, 2, begun, 20) for begun in (0, 3, 8)]
    assert lengths == [12, 9, 10]


def test_where_positions_are_afterwards() -> None:
    edits = [Edit(3, 1, 4), Edit(9, 2, 0)]
    assert [moved(i, edits) for i in (0, 2, 3, 4, 5, 6, 8)] == [0, 2, None, 7, 8, None, 9]


def test_given_text_stays() -> None:
    row = canvas("12.4..")
    row.give(5, np.array([3]))
    for edit in (Edit(4, 2, 0), Edit(5, 1, 1), Edit(0, 1, 0), Edit(5, 2, 0)):
        with pytest.raises(ValueError, match="does not fit"):
            row.edit(edit)
    row.edit(Edit(2, 1, 2))
    assert row.text_floor == 7 and row.given.tolist() == [True] + 5 * [False] + [True]


def test_a_longer_range_holds_what_the_shorter_did() -> None:
    buffer = KVBuffer(1, 20, most=1000)
    owners = [buffer.allocate(6), buffer.allocate(4)]
    assert owners == [0, 6]
    states = torch.randn(1, 2, 20, 4)
    buffer.slots = torch.arange(20)
    keys, _ = buffer.update(states, -states, 0)
    assert buffer.enlarge(6, 4, 9) == 6  # in place: what lies behind is free
    moved_to = buffer.enlarge(0, 3, 10, lanes=2)
    assert moved_to is not None and moved_to >= 15
    keys, values = buffer._keys[0], buffer._values[0]
    assert keys is not None and values is not None
    for lane in range(2):
        here = slice(moved_to + 10 * lane, moved_to + 10 * lane + 3)
        assert torch.equal(keys[:, :, here], states[:, :, 3 * lane : 3 * lane + 3])
        assert torch.equal(values[:, :, here], -states[:, :, 3 * lane : 3 * lane + 3])
    assert buffer.extents.used == 9 + 20 and buffer.allocate(6) == 0
    one = KVBuffer(1, 12)  # room only where its own slots are counted
    assert [one.allocate(4), one.allocate(4)] == [0, 4]
    one.free(0, 4)
    one.slots = torch.arange(12)
    keys, _ = one.update(states[:, :, :12], states[:, :, :12], 0)
    assert one.enlarge(4, 4, 11) == 0 and one.extents.used == 11
    assert torch.equal(keys[:, :, :4], states[:, :, 4:8])
    full = KVBuffer(1, 8)
    assert [full.allocate(4), full.allocate(4)] == [0, 4]
    assert full.enlarge(0, 4, 5) is None and full.extents.used == 8


# -- append -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("cache", "temperature"), some(product(["block", "none"], [0.8, 0.0]), 1))
def test_append_is_the_largest_canvas_on_block_causal_models(
    cache: str, temperature: float
) -> None:
    model = tiny("llada2-tiny")
    how: dict[str, Any] = {
        "sampler": "threshold(0.5)", "cache": cache, "max_new_tokens": 64, "seed": 3,
        "temperature": temperature, "block_length": model.facts.block_length,
    }  # fmt: skip
    whole = dllm.generate(model, PROMPTS, **how)
    for length in ("append", "append(lookahead=1)"):
        found = dllm.generate(model, PROMPTS, length=length, **how)
        for a, b in zip(whole, found, strict=True):
            assert outcome(a) == outcome(b)
            assert np.array_equal(a.logprobs, b.logprobs)
            assert b.canvas <= 64 and b.computed <= a.computed


def test_append_ends_where_the_text_does() -> None:
    """With the end token of a model that proposes it now and then, and without any."""
    model = tiny("llada2-tiny")
    text = dllm.generate(model, PROMPTS[0], max_new_tokens=64, sampler="threshold(0.5)",
                         eos_policy="none").tokens  # fmt: skip
    stop = text[40]
    ending = tiny("llada2-tiny", eos_token_id=stop, stop_token_ids=(stop,))
    found = dllm.generate(ending, PROMPTS[0], max_new_tokens=96, sampler="threshold(0.5)",
                          length="append")  # fmt: skip
    assert found.finish_reason == "stop" and found.tokens[-1] == stop
    assert found.canvas < 96
    endless = dllm.generate(model, PROMPTS[0], max_new_tokens=40, length="append(block=16)")
    assert endless.finish_reason == "length" and endless.canvas == 40 == len(endless.tokens)


CACHES = ["none", "dual(refresh_every=3)", "window_diffusion(active=4, window=8)"]
OTHERS = ["prefix", "dkv", "elastic", "delayed",
          "dllm_cache(prompt_every=4, response_every=2)"]  # fmt: skip


APPENDS = ["append(block=8)", "append(block=8, lookahead=0)"]
RULES = [("none", "daedal(initial=16, low=0.3, enough=0.2)")]


@pytest.mark.parametrize(
    ("cache", "length"),
    [
        *some(product(CACHES, APPENDS), 1), *RULES,
        *(pytest.param(c, rule, marks=pytest.mark.slow) for c in OTHERS for rule in APPENDS),
    ],
)  # fmt: skip
def test_a_batch_is_its_rows_and_a_small_pool_changes_nothing(cache: str, length: str) -> None:
    model = tiny("llada-tiny")
    how: dict[str, Any] = {"sampler": "threshold(0.4)", "max_new_tokens": 40, "block_length": 8,
                           "length": length}  # fmt: skip
    alone = [dllm.generate(model, prompt, cache=cache, **how) for prompt in PROMPTS]
    together = dllm.generate(model, PROMPTS, cache=cache, **how)
    assert [outcome(r) for r in together] == [outcome(r) for r in alone]
    assert [r.computed for r in together] == [r.computed for r in alone]
    with dllm.Session(model, cache=cache, max_positions=72) as session:
        cancelled = session.submit(PROMPTS[0], **how)
        crowded = [session.submit(prompt, **how) for prompt in (*PROMPTS, *PROMPTS)]
        cancelled.cancel()
        results = [handle.result(timeout=60) for handle in crowded]
    assert [outcome(r) for r in results] == [outcome(r) for r in alone] * 2
    assert session.positions_used == 0


@pytest.mark.parametrize(
    ("length", "cfg_scale"),
    covering(["append(block=8)", "daedal(initial=16, low=0.3, enough=0.2)"], [0.0, 0.5]),
)  # fmt: skip
def test_the_most_there_may_be(length: str, cfg_scale: float) -> None:
    """Never more; nothing but a stop ends a text before; streams and traces tell the same story."""
    model = tiny("llada-tiny", eos_token_id=45, stop_token_ids=(45,))
    how: dict[str, Any] = {"sampler": "threshold(0.4)", "max_new_tokens": 40, "block_length": 8,
                           "length": length, "cfg_scale": cfg_scale, "trace": True}  # fmt: skip
    for prompt in PROMPTS:
        result = dllm.generate(model, prompt, **how)
        assert result.canvas <= 40 and result.trace is not None
        if result.finish_reason == "length":
            assert len(result.tokens) == result.canvas == 40
        else:
            assert result.tokens[-1] == 45
        assert result.nfe == len(result.trace.steps)
        assert result.probes == sum(step.probe for step in result.trace.steps)
        size, seen = result.trace.length, list[int]()
        for step in result.trace.steps:
            for at, removed, added, _ in step.edits:
                assert 0 <= at <= at + removed <= size
                size += added - removed
        for event in dllm.stream(model, prompt, **how):
            seen += event.tokens
            assert event.canvas.length <= len(prompt) + 40
        assert seen == result.tokens


def test_a_canvas_of_the_most_there_may_be_is_a_fixed_one() -> None:
    model = tiny("llada-tiny")
    how: dict[str, Any] = {"sampler": "threshold(0.4)", "max_new_tokens": 32, "block_length": 8}
    fixed = dllm.generate(model, PROMPTS, **how)
    for length in ("append(block=32)", "fixed"):
        found = dllm.generate(model, PROMPTS, length=length, **how)
        assert [outcome(r) for r in found] == [outcome(r) for r in fixed]


@pytest.mark.parametrize(("growth", "probes"), [("1", 30), ("2", 6), ("inf", 3)])
def test_daedal_grows_as_fast_as_it_is_told(
    tiny: dllm.DiffusionModel, growth: str, probes: int
) -> None:
    """From 2 to 60 positions by 2, 4, 8, ..., and one more that finds the canvas full."""
    rule = f"daedal(initial=2, expand=2, enough=1, insert=False, growth={growth})"
    out = dllm.generate(tiny, [5, 6], length=rule, sampler="threshold(0)", max_new_tokens=60)
    assert isinstance(out, dllm.Result) and (out.probes, out.canvas) == (probes, 60)


# -- what does not go -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": "daedal(initial=64)", "max_new_tokens": 32}, "32 are the most"),
        ({"length": "append", "sampler": "lopa"}, "lopa plans for a text whose length"),
        ({"length": "append", "sampler": "llada", "steps": 8}, "llada plans for a text"),
        ({"length": "daedal", "sampler": "llada"}, "llada plans for a text"),
        (
            {"length": "append", "sampler": "staged_blocks"},
            "staged_blocks needs a text whose length",
        ),
        ({"length": "daedal", "cache": "dual"}, "a forward over the whole text"),
        ({"length": "grow"}, "unknown length"),
        ({"length": "threshold"}, "unknown length"),
        ({"length": "append(block=0)"}, "block must be at least 1"),
        ({"length": "append", "sampler": "threshold+daedal"}, "both a length"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(dllm.DllmError, match=message):
        dllm.generate("nano", "What is 2 + 3?", **arguments)


def test_a_model_without_an_end() -> None:
    model = tiny("llada-tiny")
    with pytest.raises(dllm.DllmError, match="length of holes"):
        dllm.infill("nano", "2 + 3 = [[*]]", length="append")
    object.__setattr__(model.facts, "eos_token_id", None)
    with pytest.raises(dllm.DllmError, match="end-of-text token"):
        dllm.generate(model, PROMPTS[0], length="daedal", max_new_tokens=20)


def test_a_pool_that_is_too_small_says_so() -> None:
    model = tiny("llada-tiny")
    with dllm.Session(model, cache="dual", max_positions=24) as session:
        handle = session.submit(PROMPTS[0], length="append(block=8)", max_new_tokens=64,
                                sampler="threshold(0.4)")  # fmt: skip
        with pytest.raises(dllm.DllmError, match="the pool holds 24"):
            handle.result(timeout=60)
        again = session.submit(PROMPTS[0], length="append(block=8, lookahead=0)",
                               max_new_tokens=16).result(timeout=60)  # fmt: skip
        assert again.canvas == 16


def test_a_text_cut_at_a_proposed_end_has_stopped() -> None:
    """The stop id is proposed, never committed: all is written in front of it, none is missing."""
    ends = [250, *range(0, 240, 40)]
    model = tiny("llada-tiny", stop_token_ids=ends)
    how: Any = {"sampler": "eotp(tau=0)+llada", "max_new_tokens": 29, "block_length": 29}
    outs = dllm.generate(model, [[5, 6, 7 + i] for i in range(12)], steps=29, **how)
    assert any(out.tokens[-1] not in ends and len(out.tokens) < 29 for out in outs)
    for out in outs:
        assert out.finish_reason == ("stop" if len(out.tokens) < 29 else "length")
