"""Verifiers of many architectures: their own text, and the caller's model left as it was."""

import sys
from importlib.util import find_spec, module_from_spec
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, cache_utils

import dllm
from dllm.drafting.base import chain
from dllm.drafting.verifiers import rowwise
from dllm.drafting.verifiers.packed import open_verifier
from dllm.models.forwards import CACHE

PROMPT = [5, 9, 33, 7, 9, 33, 50, 51]
NO_ENDS = {"vocab_size": 96, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 160}
GROUPED = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
SHAPES: dict[str, dict[str, Any]] = {
    "falcon": {**SIZES, "alibi": False},  # these three write their attention by hand
    "gptj": {**OLD, "rotary_dim": 8},
    "bamba": {**GROUPED, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
              "mamba_chunk_size": 8, "attn_layer_indices": [1]},  # positions have to be given
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 6},  # no sdpa
    "jetmoe": {**GROUPED, "kv_channels": 8, "num_local_experts": 2},
    "lfm2": {**GROUPED, "layer_types": ["conv", "full_attention"]},
    "deepseek_v32": {  # attends to the keys that an indexer finds, which has a cache of its own
        **SIZES, "intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 8,
        "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "index_topk": 8, "index_n_heads": 32, "index_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 16, "max_position_embeddings": 256},
    "electra": {**SIZES, "embedding_size": 32, "intermediate_size": 48},  # an encoder
    "cpmant": {**SIZES, "dim_head": 8, "dim_ff": 48},
    "minimax": {**GROUPED, "layer_types": ["linear_attention", "full_attention"],
                "num_local_experts": 2, "head_dim": 8},
    "mamba": {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32},
    "recurrent_gemma": {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
                        "intermediate_size": 48, "lru_width": 32, "attention_window_size": 8},
}  # fmt: skip


def network(kind: str) -> Any:
    torch.manual_seed(0)
    shape = NO_ENDS | {"initializer_range": 0.5} | SHAPES[kind]
    if kind == "rwkv":
        del shape["pad_token_id"], shape["initializer_range"]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).eval()


def greedy(hf: Any, count: int = 10) -> list[int]:
    """Token by token, everything computed again: the oracle."""
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(hf(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("kind", ["falcon", "gptj", "bamba", "bloom", "gemma2", "jetmoe", "lfm2",
                                  "deepseek_v32"])  # fmt: skip
def test_the_text_is_the_networks_own(kind: str) -> None:
    hf = network(kind)
    expected = greedy(hf)
    for drafter, controller in ((None, None), ("prompt_lookup", "full")):
        out = dllm.speculate(hf, drafter, PROMPT, controller=controller, max_new_tokens=10)
        assert out.tokens == expected
    assert greedy(hf) == expected, "the caller's model is left as it was"


@pytest.mark.parametrize("kind", ["falcon", "lfm2"])
def test_a_round_tried_anew_costs_no_second_forward(kind: str) -> None:
    verifier = open_verifier(dllm.load(network(kind), family="autoregressive"))
    text, draft = verifier.open(np.array(PROMPT), 40), chain([3, 4])
    (first,), (again,) = verifier.score([(text, draft)]), verifier.score([(text, draft)])
    assert again is first and text.forwards == 1
    (other,) = verifier.score([(text, chain([3, 5]))])
    torch.testing.assert_close(other.logits[:2], first.logits[:2], atol=1e-4, rtol=1e-4)
    assert text.forwards == 2


def test_packed_attention_can_be_viewed() -> None:
    """JetMoE's layers take views of it; exact attention sums head by head."""
    hf = network("jetmoe").bfloat16()
    assert len(dllm.speculate(hf, None, PROMPT, max_new_tokens=3).tokens) == 3


def test_what_sees_tokens_behind_it_verifies_no_drafts() -> None:
    hf = network("electra")
    assert len(dllm.speculate(hf, None, PROMPT, max_new_tokens=4).tokens) == 4
    with pytest.raises(dllm.ConfigError, match="or otherwise than one by one"):
        dllm.speculate(hf, "prompt_lookup", PROMPT, max_new_tokens=4)


@pytest.mark.parametrize("kind", ["mamba", "minimax", "rwkv", "recurrent_gemma", "cpmant"])
def test_networks_without_a_cache_are_refused(kind: str) -> None:
    """Or with states in their modules, which texts would share, or beside the whole text."""
    hf = network(kind)
    if kind == "mamba" and CACHE in signature(hf.forward).parameters:  # from transformers 5.24 on
        assert dllm.speculate(hf, None, PROMPT, max_new_tokens=10).tokens == greedy(hf)
        return
    with pytest.raises(dllm.ConfigError, match="keeps its state in a form of its own"):
        dllm.speculate(hf, None, PROMPT, max_new_tokens=4)


def test_a_transformers_without_dummy_layers_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.23."""
    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)
    spec: Any = find_spec(rowwise.__name__)
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look it up
    spec.loader.exec_module(module)
    assert module.CUT[:2] == rowwise.CUT[:2]
