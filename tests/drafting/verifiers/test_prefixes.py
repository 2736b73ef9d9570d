"""Prefixes that stay: the same tokens with and without, and less that is computed."""

from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.drafting.base import chain
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.drafting.verifiers.packed import PackedVerifier
from dllm.drafting.verifiers.rowwise import RowVerifier
from dllm.engine.prefixes import Prefixes, weights_of

from ...thin import some
from ..conftest import make_verifier
from ..dflash.conftest import random_drafter
from .test_recurrent import network

rng = np.random.default_rng(0)
SYSTEM = rng.integers(4, 60, 40).tolist()
NEW = 8


def questions(count: int) -> list[list[int]]:
    return [[*SYSTEM, *rng.integers(4, 60, 3 + i).tolist()] for i in range(count)]


def answered(session: dllm.Session, prompts: list[list[int]], **how: Any) -> list[dllm.Result]:
    return [session.submit(ids, max_new_tokens=NEW, **how).result() for ids in prompts]


def test_the_pool_finds_keeps_and_lets_go() -> None:
    gone: list[str] = []
    pool: Prefixes[str] = Prefixes(gone.append, 100)
    a, b = np.arange(40), np.arange(1000, 1040)
    assert pool.keep("a", a, 0) and pool.keep("b", b, 0)
    assert pool.find(np.arange(30), 0) == ("a", 29)  # the last token is always fed
    assert pool.find(np.arange(30), 1) is None  # other weights
    assert pool.find(np.r_[np.arange(20), 7, 7], 0) == ("a", 20)
    assert pool.find(np.r_[np.arange(20), 7, 7], 0, whole=True) is None
    assert pool.find(np.r_[np.arange(10), 7, 7], 0) is None  # too few to be worth it
    assert pool.find(np.r_[b, 1], 0, whole=True) == ("b", 40)
    assert pool.keep("c", np.arange(2000, 2030), 0)
    assert gone == ["a"]  # b was used last
    assert pool.keep("d", np.r_[b, 5, 6], 0)
    assert gone == ["a", "b"]  # d begins with it
    assert not pool.keep("e", np.arange(101), 0) and not pool.keep("f", np.arange(5), 0)
    assert pool.held == 72
    pool.shrink(50)
    assert gone == ["a", "b", "c"] and pool.hits == 3 and pool.reused == 29 + 20 + 40


@pytest.fixture(scope="module", params=some(["packed", "hybrid", "windowed"], 1))
def model(request: pytest.FixtureRequest) -> dllm.DiffusionModel:
    if request.param == "hybrid":
        return dllm.load(network("qwen3_5_text"), family="autoregressive")
    return make_verifier("full" if request.param == "packed" else "windowed")


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.8])
def test_the_same_tokens_with_and_without(model: dllm.DiffusionModel, temperature: float) -> None:
    """Second turns go on from first ones; everything else begins like a text before it."""
    prompts = questions(4)
    how: dict[str, Any] = {"temperature": temperature, "seed": 5}
    with dllm.Session(model, prefix_cache_tokens=0) as off, dllm.Session(model) as on:
        plain, kept = answered(off, prompts, **how), answered(on, prompts, **how)
        assert [r.tokens for r in kept] == [r.tokens for r in plain]
        assert not any(r.cached_tokens for r in plain)
        turns = [[*p, *r.tokens, 9, 8] for p, r in zip(prompts, plain, strict=True)]
        second, again = answered(off, turns, **how), answered(on, turns, **how)
        assert [r.tokens for r in again] == [r.tokens for r in second]
        for turn, with_it, without in zip(turns, again, second, strict=True):
            assert with_it.cached_tokens == len(turn) - 3  # of the last answer one was not fed
            assert without.computed - with_it.computed == with_it.cached_tokens
    if model.hf.config.model_type != "qwen3_5_text":  # states of other texts' middles are not kept
        assert kept[0].cached_tokens == 0 and all(r.cached_tokens >= 40 for r in kept[1:])


def test_bit_for_bit_where_sums_are_exact() -> None:
    model = make_verifier("full")
    hf: Any = model.hf
    half = dllm.load(hf.to(torch.bfloat16), family="autoregressive", tokenizer=model.tokenizer)
    prompts = questions(3)
    with dllm.Session(half, prefix_cache_tokens=0) as off, dllm.Session(half) as on:
        plain, kept = answered(off, prompts), answered(on, prompts)
    assert kept[0].cached_tokens == 0 and all(r.cached_tokens >= 40 for r in kept[1:])
    for a, b in zip(plain, kept, strict=True):
        assert a.tokens == b.tokens and np.array_equal(a.logprobs, b.logprobs)


def test_texts_that_join_and_a_budget_that_is_small() -> None:
    model = make_verifier("full")
    prompts = [*questions(6), [5, 6, 7], *questions(3)]
    with dllm.Session(model, prefix_cache_tokens=0, max_batch_size=3) as off:
        plain = [h.result() for h in [off.submit(p, max_new_tokens=NEW) for p in prompts]]
    with dllm.Session(model, prefix_cache_tokens=60, max_batch_size=3) as on:
        kept = [h.result() for h in [on.submit(p, max_new_tokens=NEW) for p in prompts]]
        engine: Any = on._scheduler.engine
        assert engine.verifier.prefixes.held <= 60
        assert engine.verifier.prefixes.hits > 0
    assert [r.tokens for r in kept] == [r.tokens for r in plain]


def test_rows_have_precedence_over_what_is_kept() -> None:
    """Room for one text: the next one gets it, and nothing is left taken at the end."""
    model = make_verifier("full")
    prompts = questions(3)
    most = max(map(len, prompts)) + NEW
    with dllm.Session(model, max_positions=most, max_batch_size=1) as session:
        results = answered(session, prompts)
        engine: Any = session._scheduler.engine
        verifier: Any = engine.verifier
        verifier.prefixes.shrink(0)
        assert verifier.buffer.extents.used == verifier.least
    plain = dllm.speculate(model, None, prompts, max_new_tokens=NEW)
    assert [r.tokens for r in results] == [r.tokens for r in plain]


def test_a_text_that_cannot_be_kept_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> bool:
        raise MemoryError("forced")

    model, prompts = make_verifier("full"), questions(2)
    with dllm.Session(model, prefix_cache_tokens=0) as session:
        expected = [r.tokens for r in answered(session, prompts)]
    monkeypatch.setattr(Prefixes, "keep", fail)
    with dllm.Session(model) as session:
        assert [r.tokens for r in answered(session, prompts)] == expected
        assert session.positions_used == 0
    assert "could not be kept" in caplog.text


def test_out_of_memory_takes_the_kept_texts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_verifier("full")
    verifier = PackedVerifier(model)
    verifier.prefixes.budget = 1000
    text = verifier.open(np.array(SYSTEM), 60)
    assert text.size == 128  # with room for the nodes of trees, in whole grains
    verifier.score([(text, chain([]))])
    verifier.commit(text, chain([]), [], [7])
    verifier.close(text)
    assert verifier.prefixes.held == 40
    whole, failures = verifier.buffer.allocate, []

    def allocate(n: int) -> int | None:
        if not failures:
            failures.append(n)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(n)

    monkeypatch.setattr(verifier.buffer, "allocate", allocate)
    again = verifier.open(np.array([*SYSTEM, 3]), 60)
    assert failures and again.cached == 0 and verifier.prefixes.held == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_prefix_belongs_to_weights_and_adapter() -> None:
    peft = pytest.importorskip("peft")
    model = make_verifier("full")
    hf: Any = model.hf
    prompts = questions(1) * 2
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    before = weights_of(hf)
    assert before == weights_of(hf)
    wrapped = peft.get_peft_model(hf, config)
    with_adapter = weights_of(hf)
    assert with_adapter != before
    verifier = RowVerifier(dllm.load(hf, family="autoregressive", tokenizer=model.tokenizer))
    verifier.prefixes.budget = 1000

    def open_and_close() -> int:
        text = verifier.open(np.array(prompts[0]), 60)
        cached = text.cached
        verifier.score([(text, chain([]))])
        verifier.commit(text, chain([]), [], [7])
        verifier.close(text)
        return cached

    assert open_and_close() == 0 and open_and_close() == len(prompts[0]) - 1
    with wrapped.disable_adapter():
        assert open_and_close() == 0
    assert open_and_close() == len(prompts[0]) - 1
    with torch.no_grad():
        hf.get_input_embeddings().weight[5] += 1  # trained on
    assert open_and_close() == 0


def test_a_block_drafter_sees_what_was_not_computed_again() -> None:
    model = make_verifier("full")
    checkpoint, prompts = random_drafter(model), questions(3)
    rounds = []
    for keep in (0, 1000):
        with dllm.Session(model, drafter=BlockDrafter(checkpoint), controller="full",
                          prefix_cache_tokens=keep) as session:  # fmt: skip
            results: Any = answered(session, prompts)
        assert [r.cached_tokens >= 40 for r in results] == [False, keep > 0, keep > 0]
        rounds.append([(r.tokens, [(s.drafted, s.accepted) for s in r.rounds]) for r in results])
        assert all(r.drafted > 5 for r in results)
    assert rounds[0] == rounds[1]


def test_bidirectional_models_say_why_not() -> None:
    with pytest.raises(dllm.ConfigError, match="depend on what follows"):
        dllm.Session("nano", prefix_cache_tokens=100)
    dllm.Session("nano", prefix_cache_tokens=0).close()
