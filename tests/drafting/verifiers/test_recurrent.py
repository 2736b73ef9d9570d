"""Hybrid verifiers: states, logits and texts after speculation are those of plain decoding."""

import threading
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import dllm
from dllm.drafting.base import chain
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.drafting.verifiers.base import layers_of
from dllm.drafting.verifiers.packed import open_verifier
from dllm.drafting.verifiers.recurrent import RecurrentVerifier

from ...thin import some
from ..conftest import Scripted
from ..dflash.conftest import random_drafter

COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": None, "max_position_embeddings": 256, "initializer_range": 0.4,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "num_hidden_layers": 3, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}  # fmt: skip
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2,
         "chunk_size": 8, "use_mamba_kernels": False}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **EXPERTS},
    "nemotron_h": {**MAMBA, "num_hidden_layers": 4, "layers_block_type": [
        "linear_attention", "mlp", "full_attention", "linear_attention"]},
    "falcon_h1": {"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 4,
                  "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
                  "mamba_chunk_size": 8},
    "jamba": {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
              "num_experts": 2, "mamba_d_state": 4, "use_mamba_kernels": False},
}  # fmt: skip
STEPPED = [kind for kind in SHAPES if kind != "jamba"]
SLOW = pytest.param("nemotron_h", marks=pytest.mark.slow)
PROMPT = [5, 9, 33, 7, 9, 33, 50, 51]


def network(kind: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON, **SHAPES[kind])
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def models() -> dict[str, dllm.DiffusionModel]:
    return {kind: dllm.load(network(kind), family="autoregressive") for kind in SHAPES}


def states(cache: Any) -> list[torch.Tensor]:
    """Everything that a text's cache holds."""
    found = []
    for layer in cache.layers:
        for name in ("conv_states", "recurrent_states"):
            held = getattr(layer, name, {}).get(0)
            if held is not None:
                width = layer.conv_kernel_size[0] if name == "conv_states" else held.shape[-1]
                found.append(held[..., -width:].clone())
        if getattr(layer, "keys", None) is not None and layer.keys.numel():
            found += [layer.keys.clone(), layer.values.clone()]
    return found


@pytest.mark.parametrize("kind", some(STEPPED, 2))
def test_states_and_logits_after_drafts_are_those_of_plain_decoding(
    models: dict[str, dllm.DiffusionModel], kind: str
) -> None:
    """Rounds that accept nothing, some and all of a draft, and rounds without one between them."""
    model = models[kind]
    plain, drafted = RecurrentVerifier(model), RecurrentVerifier(model)
    assert isinstance(open_verifier(model), RecurrentVerifier)
    close = {"atol": 1e-4, "rtol": 1e-4}
    want = plain.open(np.array(PROMPT), 64)
    got = drafted.open(np.array(PROMPT), 64)
    rng = np.random.default_rng(0)
    empty = chain([])
    for length, accepted in ((3, 0), (4, 2), (0, 0), (2, 2), (0, 0), (5, 1), (1, 1), (3, 3)):
        tokens = rng.integers(0, 96, length)
        (scored,) = drafted.score([(got, chain(tokens))])
        extra = int(rng.integers(0, 96))
        rows = []
        for token in [*tokens[:accepted].tolist(), extra]:
            (row,) = plain.score([(want, empty)])
            rows.append(row.logits[0])
            plain.commit(want, empty, [], [token])
        expected = torch.stack(rows)
        torch.testing.assert_close(scored.logits[: accepted + 1], expected, **close)
        emitted = [*tokens[:accepted].tolist(), extra]
        drafted.commit(got, chain(tokens), list(range(accepted)), emitted)
        assert got.tokens == want.tokens and got.cached == want.cached
        mine, theirs = states(got.cache), states(want.cache)
        assert len(mine) == len(theirs) > 2
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, **close)
    assert got.forwards == 8  # never a second forward


@pytest.mark.parametrize(("kind", "temperature"), some(product(STEPPED, [0.8, 0.0]), 1))
def test_texts_are_those_of_plain_decoding(
    models: dict[str, dllm.DiffusionModel], kind: str, temperature: float
) -> None:
    """Batches, lookups that have nothing to say in some rounds, and texts that join."""
    model = models[kind]
    prompts = [PROMPT, PROMPT[:5], [7, 8, 9] * 4, [60]]
    how: dict[str, Any] = {"max_new_tokens": 16, "temperature": temperature, "seed": 3}
    plain = dllm.speculate(model, None, prompts, **how)
    drafted = dllm.speculate(
        model, "prompt_lookup", prompts, controller="full", max_batch_size=2, **how
    )  # fmt: skip
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    noisy = Scripted(text=[*PROMPT, *plain[0].tokens], k=4, noise=0.3)
    result = dllm.speculate(model, noisy, PROMPT, controller="full", **how)
    assert result.tokens == plain[0].tokens
    assert 3 < result.accepted < result.drafted


@pytest.mark.parametrize("kind", ["qwen3_5_text", SLOW])
def test_target_layers_and_block_drafters(
    models: dict[str, dllm.DiffusionModel], kind: str
) -> None:
    model = models[kind]
    part = BlockDrafter(random_drafter(model, target_layer_ids=[0, 1]))
    plain = dllm.speculate(model, None, PROMPT, max_new_tokens=16)
    drafted = dllm.speculate(model, part, PROMPT, max_new_tokens=16, controller="full")
    assert drafted.tokens == plain.tokens and drafted.drafted > 20
    verifier = RecurrentVerifier(model, (0, 1))
    text = verifier.open(np.array(PROMPT), 40)
    seen = []
    for tokens, accepted in (([3, 4], 1), ([5, 6, 7], 0), ([9], 1)):
        (scored,) = verifier.score([(text, chain(tokens))])
        fresh = len(text.fresh)
        assert scored.hidden is not None
        seen.append(scored.hidden[: fresh + accepted])
        verifier.commit(text, chain(tokens), list(range(accepted)), [*tokens[:accepted], 11])
    with torch.no_grad():
        out = model.hf(torch.tensor([text.tokens[:-1]]), output_hidden_states=True).hidden_states
    expected = torch.cat([out[1][0], out[2][0]], -1)
    torch.testing.assert_close(torch.cat(seen), expected, atol=2e-2, rtol=1e-2)


@pytest.mark.slow
def test_a_text_given_up_leaves_the_others_alone(models: dict[str, dllm.DiffusionModel]) -> None:
    model = models["qwen3_next"]
    how: dict[str, Any] = {"max_new_tokens": 16, "controller": "full"}
    plain = dllm.speculate(model, None, [PROMPT, [7, 8, 9] * 4], max_new_tokens=16)
    events = dllm.stream_speculate(model, "prompt_lookup", [PROMPT, [7, 8, 9] * 4], **how)
    for _ in range(4):
        next(events)
    events.close()
    again = dllm.speculate(model, "prompt_lookup", [PROMPT, [7, 8, 9] * 4], **how)
    assert [r.tokens for r in again] == [r.tokens for r in plain]


def test_what_cannot_be_taken_back_is_refused(models: dict[str, dllm.DiffusionModel]) -> None:
    model, hybrid = models["jamba"], models["qwen3_5_text"]
    hf: Any = model.hf
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(8):
            tokens.append(int(hf(torch.tensor([tokens])).logits[0, -1].argmax()))
    plain = dllm.speculate(model, None, PROMPT, max_new_tokens=8)
    assert plain.tokens == tokens[len(PROMPT) :]
    with pytest.raises(dllm.ConfigError, match="several tokens only at the start"):
        dllm.speculate(model, Scripted(), PROMPT, controller="full", max_new_tokens=8)
    trees = dllm.speculate(hybrid, "cacheback", PROMPT, max_new_tokens=12)  # makes chains
    assert trees.tokens == dllm.speculate(hybrid, None, PROMPT, max_new_tokens=12).tokens


def test_a_session_refuses_at_its_start_what_every_request_would_be(
    models: dict[str, dllm.DiffusionModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(dllm.ConfigError, match="several tokens only at the start"):
        dllm.Session(models["jamba"], drafter="prompt_lookup")
    monkeypatch.setattr(Scripted, "trees", True)
    with pytest.raises(dllm.ConfigError, match="use a search that returns a chain"):
        dllm.Session(models["qwen3_5_text"], drafter=Scripted())


@pytest.mark.parametrize("kind", some(["qwen3_5_text", "gqa", "nemotron_h"], 1))
def test_a_round_that_fails_leaves_no_trace(
    models: dict[str, dllm.DiffusionModel], verifiers: dict[str, dllm.DiffusionModel], kind: str
) -> None:
    """In the middle of a forward, whose texts are then tried again, and behind one."""
    model = {**models, **verifiers}[kind]
    several = [PROMPT * 3, [7, 8, 9] * 6, [60] * 18]
    plain = [r.tokens for r in dllm.speculate(model, None, several, max_new_tokens=16)]
    calls, errors = [], {8: RuntimeError("lost"), 17: torch.OutOfMemoryError("CUDA out of memory")}

    def failing(*_: Any) -> None:
        calls.append(1)
        if len(calls) in errors:
            raise errors[len(calls)]

    handle = layers_of(model.hf)[-1].register_forward_hook(failing)
    drafted = dllm.speculate(model, "prompt_lookup", several, controller="full",
                             max_new_tokens=16)  # fmt: skip
    handle.remove()
    assert len(calls) > 17
    assert [r.tokens for r in drafted] == plain

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > len(several[1]) + 6:
            raise ZeroDivisionError("a part gave up")
        return scores

    how: dict[str, Any] = {"max_new_tokens": 16, "controller": "full"}
    noisy = Scripted(text=[*several[1], *plain[1]], k=4, noise=0.3)
    with dllm.Session(model, drafter=noisy) as session:
        with pytest.raises(ZeroDivisionError):
            session.submit(several[1], logits_processor=[broken], **how).result(60)
        longer = [*several[1], *plain[1][:9]]
        assert session.submit(longer, **how).result(60).tokens[:7] == plain[1][9:]


@pytest.mark.parametrize("kind", ["qwen3_5_text", SLOW])
def test_threads_do_not_meet_in_a_recurrence(
    models: dict[str, dllm.DiffusionModel], kind: str
) -> None:
    """In the middle of a forward with a draft another thread opens the same network for a text of
    its own, and runs another network of the same kind."""
    model, other = models[kind], network(kind)
    hf: Any = model.hf
    plain = dllm.speculate(model, None, PROMPT, max_new_tokens=12)
    noisy = Scripted(text=[*PROMPT, *plain.tokens], k=4, noise=0.3)
    expected, seen, opened = [], [], []

    def run(to: list[torch.Tensor]) -> None:
        with torch.no_grad():
            to.append(other(torch.tensor([PROMPT])).logits)

    def meanwhile(*_: Any) -> None:
        if not opened:
            opened.append(RecurrentVerifier(model))
        thread = threading.Thread(target=run, args=(seen,))
        thread.start()
        thread.join()

    run(expected)
    handle = layers_of(hf)[0].register_forward_hook(meanwhile)
    drafted = dllm.speculate(model, noisy, PROMPT, max_new_tokens=12, controller="full")
    handle.remove()
    assert drafted.tokens == plain.tokens and len(seen) > 3
    assert all(torch.equal(logits, expected[0]) for logits in seen)
    (late,) = opened
    text = late.open(np.array(PROMPT), 40)
    for tokens, accepted in (([3, 4, 5], 1), ([plain.tokens[0], 6], 0)):
        late.score([(text, chain(tokens))])
        late.commit(text, chain(tokens), list(range(accepted)), [*tokens[:accepted], 11])
    (scored,) = late.score([(text, chain([9]))])
    with torch.no_grad():
        want = hf(torch.tensor([[*text.tokens, 9]])).logits[0, -2:]
    torch.testing.assert_close(scored.logits, want, atol=1e-3, rtol=1e-3)
