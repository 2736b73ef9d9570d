"""Prefixes that stay in the engine of diffusion rows: the same bits with and without them."""

from functools import cache as once
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import dllm
from dllm.engine import Engine
from dllm.engine.prefixes import Prefixes
from dllm.kernels.linear import available

from ..models.wedlm import MASK, SHAPE
from ..thin import covering, some

GRID = 4
KINDS = {  # family -> network, cache, what else tells it
    "sdar": (Qwen3ForCausalLM, Qwen3Config, "block", {"block_length": GRID}),
    "fast_dllm_v2": (Qwen2ForCausalLM, Qwen2Config, "block", {"block_length": GRID}),
    "wedlm": (Qwen3ForCausalLM, Qwen3Config, "wedlm", {}),
}
rng = np.random.default_rng(0)
SYSTEM = rng.integers(4, 60, 41).tolist()
QUESTIONS = [[*SYSTEM, *rng.integers(4, 60, 3 + i).tolist()] for i in range(5)]


def network(kind: str, precision: str = "float32") -> dllm.DiffusionModel:
    """Random weights in the shape of a family."""
    made, config, _, facts = KINDS[kind]
    torch.manual_seed(1)
    hf = made(config(**SHAPE, **({"head_dim": 8} if made is Qwen3ForCausalLM else {})))
    with torch.no_grad():
        for weight in hf.parameters():
            weight.mul_(4)
    rounded = {"dtype": "bfloat16", "quantization": "int8"} if precision == "int8" else {}
    given = rounded or {"dtype": precision}
    return dllm.load(hf, family=kind, mask_token_id=MASK, **facts, **given)


model = once(network)


def opened(kind: str, *precision: str, **how: Any) -> dllm.Session:
    return dllm.Session(model(kind, *precision), cache=KINDS[kind][2], **how)


def answers(session: dllm.Session, prompts: Any, **how: Any) -> list[dllm.Result]:
    how = {"max_new_tokens": 14, "sampler": "threshold(0.05)", "eos_policy": "none"} | how
    return [handle.result() for handle in [session.submit(ids, **how) for ids in prompts]]


def engine_of(session: dllm.Session) -> Engine:
    engine: Any = session._scheduler.engine
    return engine  # type: ignore[no-any-return]


def same(kept: list[dllm.Result], plain: list[dllm.Result], bits: bool) -> None:
    """Also the last bit, where nothing depends on how many positions are computed at once: the row
    before a block, which a shifted output computes once more, and WeDLM's attention do."""
    for a, b in zip(kept, plain, strict=True):
        assert (a.tokens, a.order, a.nfe) == (b.tokens, b.order, b.nfe)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        if bits and available():
            assert np.array_equal(a.logprobs, b.logprobs)


@pytest.mark.parametrize(("kind", "temperature"), some(product(KINDS, [0.8, 0.0]), 1))
def test_the_same_bits_with_and_without(kind: str, temperature: float) -> None:
    """One after the other, then second turns, of which the first answer is part."""
    how: dict[str, Any] = {"temperature": temperature, "seed": 3}
    with opened(kind, prefix_cache_tokens=0) as off, opened(kind) as on:
        plain, kept = ([answers(s, [p], **how)[0] for p in QUESTIONS[:3]] for s in (off, on))
        same(kept, plain, kind == "sdar")
        turns = [[*p, *r.tokens, 9, 8] for p, r in zip(QUESTIONS, plain, strict=False)]
        second, again = ([answers(s, [p], **how)[0] for p in turns] for s in (off, on))
        same(again, second, kind == "sdar")
        assert not any(r.cached_tokens for r in (*plain, *second))
    block = model(kind).facts.block_length or 1
    shared = len(SYSTEM) // block * block
    assert kept[0].cached_tokens == 0 and all(r.cached_tokens >= shared for r in kept[1:])
    for one, other, turn in zip(again, second, turns, strict=True):
        assert len(turn) - one.cached_tokens < 2 + 14 + GRID  # without the last steps'
        assert one.cached_tokens % block == 0
        assert 0 <= other.computed - one.computed - one.cached_tokens <= GRID


@pytest.mark.parametrize(("kind", "precision"), covering([*KINDS], ["bfloat16", "int8"]))
def test_other_precisions(kind: str, precision: str) -> None:
    """Second turns in half precision and with weights of eight bits: again the same bits."""
    results = []
    for keep in (0, None):
        with opened(kind, precision, prefix_cache_tokens=keep) as session:
            (first,) = answers(session, QUESTIONS[:1])
            results.append((first, *answers(session, [[*QUESTIONS[0], *first.tokens, 9, 8]])))
    plain, kept = results
    assert kept[1].cached_tokens >= len(QUESTIONS[0]) and not plain[1].cached_tokens
    same(kept, plain, True)


@pytest.mark.parametrize(
    ("kind", "pool"),
    some(
        product(["wedlm", "fast_dllm_v2"], [{"prefix_cache_tokens": 60}, {"max_positions": 130}]), 1
    ),
)
def test_joins_and_little_room(kind: str, pool: dict[str, int]) -> None:
    """Texts that join and grow; rows have precedence, and nothing is left taken at the end."""
    prompts = [*QUESTIONS, [5, 6, 7], *QUESTIONS[::-1]]
    how: dict[str, Any] = {"length": "append(block=4)"}
    with opened(kind, prefix_cache_tokens=0, max_batch_size=3) as off:
        plain = answers(off, prompts, **how)
    with opened(kind, max_batch_size=2, **pool) as on:
        kept = answers(on, prompts, **how)
        engine = engine_of(on)
        pool_now = engine.prefixes
        assert pool_now.held <= 130 and pool_now.hits > 0
        buffer: Any = engine.forward.buffer
        assert buffer.extents.used == pool_now.held  # the rest has been given back
        pool_now.shrink(0)
        assert buffer.extents.used == 0
    assert [r.tokens for r in kept] == [r.tokens for r in plain]


def test_a_row_that_fails_or_is_cancelled_is_not_kept() -> None:
    with opened("sdar") as session:
        handle = session.submit(QUESTIONS[0], max_new_tokens=200, sampler="llada", steps=200)
        next(iter(handle))
        handle.cancel()
        assert answers(session, QUESTIONS[:1])[0].cached_tokens == 0
        assert answers(session, QUESTIONS[:1])[0].cached_tokens == len(QUESTIONS[0]) // GRID * GRID


def test_out_of_memory_takes_the_kept_texts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("sdar") as session:
        (plain,) = answers(session, QUESTIONS[:1])
        engine, failures = engine_of(session), []
        assert engine.prefixes.held
        buffer: Any = engine.forward.buffer
        whole = buffer.allocate

        def allocate(n: int) -> int | None:
            if not failures:
                failures.append(n)
                raise torch.OutOfMemoryError("CUDA out of memory.")
            result: int | None = whole(n)
            return result

        monkeypatch.setattr(buffer, "allocate", allocate)
        (again,) = answers(session, QUESTIONS[:1])
    assert failures and again.cached_tokens == 0 and again.tokens == plain.tokens


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_prefix_belongs_to_weights_and_adapter() -> None:
    peft = pytest.importorskip("peft")
    loaded = network("sdar")
    hf: Any = loaded.hf
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(hf, config)

    def reused() -> int:
        return answers(session, QUESTIONS[:1])[0].cached_tokens

    with dllm.Session(loaded, cache="block") as session:
        assert reused() == 0 and reused() > 40
        with wrapped.disable_adapter():
            assert reused() == 0 and reused() > 40
        assert reused() > 40
        with torch.no_grad():
            hf.get_input_embeddings().weight[5] += 1  # trained on
        assert reused() == 0


def test_a_text_that_cannot_be_kept_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> bool:
        raise MemoryError("forced")

    with opened("sdar", prefix_cache_tokens=0) as session:
        expected = answers(session, QUESTIONS[:2])
    monkeypatch.setattr(Prefixes, "keep", fail)
    with opened("sdar") as session:
        same(answers(session, QUESTIONS[:2]), expected, True)
        assert engine_of(session).used == 0
    assert "could not be kept" in caplog.text


def test_who_cannot_says_why() -> None:
    with pytest.raises(dllm.ConfigError, match="depend on what follows"):
        dllm.Session("nano", prefix_cache_tokens=100)
    for kind, cache in (("sdar", "block"), ("wedlm", "wedlm")):
        with pytest.raises(dllm.ConfigError, match=f"pass cache='{cache}', or leave"):
            dllm.Session(model(kind), cache="none", prefix_cache_tokens=100)
        dllm.Session(model(kind), cache=cache, prefix_cache_tokens=100).close()  # as advised
    dllm.Session("nano", prefix_cache_tokens=0).close()
