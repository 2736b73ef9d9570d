"""LLaDA2 against a forward written out from its description, one position and expert at a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

import dllm

D, HEADS, KV, HEAD, ROTATED, EXPERTS, WIDTH, LAYERS, VOCAB, BLOCK = (
    32,
    4,
    2,
    16,
    8,
    8,
    12,
    3,
    64,
    32,
)
CONFIG: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "hidden_size": D,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": HEAD, "intermediate_size": 40, "first_k_dense_replace": 1, "num_experts": EXPERTS,
    "num_experts_per_tok": 3, "moe_intermediate_size": WIDTH, "num_shared_experts": 1, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "norm_topk_prob": True, "partial_rotary_factor": 0.5,
    "rope_theta": 600000, "use_qk_norm": True, "use_qkv_bias": False, "use_bias": False,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "vocab_size": VOCAB, "hidden_act": "silu",
    "tie_word_embeddings": False, "norm_head": False, "pad_token_id": 60, "eos_token_id": 60,
    "mask_token_id": 63, "auto_map": {"AutoModel": "modeling_llada2_moe.LLaDA2MoeModelLM"},
}  # fmt: skip


def checkpoint() -> dict[str, Tensor]:
    """Random weights under the official names."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    result = {"model.word_embeddings.weight": normal(VOCAB, D), "lm_head.weight": normal(VOCAB, D),
             "model.norm.weight": 1 + normal(D)}  # fmt: skip
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        result |= {
            f"{at}attention.query_key_value.weight": normal((HEADS + 2 * KV) * HEAD, D),
            f"{at}attention.query_layernorm.weight": 1 + normal(HEAD),
            f"{at}attention.key_layernorm.weight": 1 + normal(HEAD),
            f"{at}attention.dense.weight": normal(D, HEADS * HEAD),
            f"{at}input_layernorm.weight": 1 + normal(D),
            f"{at}post_attention_layernorm.weight": 1 + normal(D),
        }
        units = {"mlp.": 40} if i == 0 else {
            **{f"mlp.experts.{e}.": WIDTH for e in range(EXPERTS)}, "mlp.shared_experts.": WIDTH,
        }  # fmt: skip
        for unit, width in units.items():
            result |= {
                f"{at}{unit}gate_proj.weight": normal(width, D),
                f"{at}{unit}up_proj.weight": normal(width, D),
                f"{at}{unit}down_proj.weight": normal(D, width),
            }
        if i:
            result |= {f"{at}mlp.gate.weight": normal(EXPERTS, D),
                      f"{at}mlp.gate.expert_bias": normal(EXPERTS)}  # fmt: skip
    return result


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rotate(x: Tensor, position: int) -> Tensor:
    """(heads, head): the first channels of each head turn, the others pass."""
    half = ROTATED // 2
    angle = position * 600000.0 ** (-torch.arange(half) * 2 / ROTATED)
    a, b, rest = x[:, :half], x[:, half:ROTATED], x[:, ROTATED:]
    return torch.cat(
        [a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1
    )


def route(x: Tensor, gate: Tensor, bias: Tensor) -> dict[int, float]:
    """Expert -> weight for one position."""
    score = (gate @ x).sigmoid()
    choice = (score + bias).tolist()
    groups = [list(range(g * 2, g * 2 + 2)) for g in range(4)]
    best = sorted(groups, key=lambda g: -sum(sorted((choice[e] for e in g), reverse=True)[:2]))[:2]
    experts = sorted((e for g in best for e in g), key=lambda e: -choice[e])[:3]
    total = sum(float(score[e]) for e in experts)
    return {e: 2.5 * float(score[e]) / total for e in experts}


def reference(w: dict[str, Tensor], ids: list[int]) -> Tensor:
    """(N, V) logits."""

    def unit(name: str, x: Tensor) -> Tensor:
        gate, up, down = (w[f"{name}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return down @ (silu(gate @ x) * (up @ x))

    hidden = [w["model.word_embeddings.weight"][i] for i in ids]
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        q, k, v = [], [], []
        for position, x in enumerate(hidden):
            fused = w[f"{at}attention.query_key_value.weight"] @ norm(
                x, w[f"{at}input_layernorm.weight"]
            )
            heads = fused.view(HEADS + 2 * KV, HEAD)
            queries = norm(heads[:HEADS], w[f"{at}attention.query_layernorm.weight"])
            keys = norm(heads[HEADS : HEADS + KV], w[f"{at}attention.key_layernorm.weight"])
            q.append(rotate(queries, position))
            k.append(rotate(keys, position))
            v.append(heads[HEADS + KV :])
        for position in range(len(ids)):
            end = min((position // BLOCK + 1) * BLOCK, len(ids))
            out = []
            for head in range(HEADS):
                kv = head // (HEADS // KV)
                scores = torch.stack([q[position][head] @ k[p][kv] for p in range(end)]) / HEAD**0.5
                share = scores.softmax(0)
                out.append(sum(share[p] * v[p][kv] for p in range(end)))
            hidden[position] = hidden[position] + w[f"{at}attention.dense.weight"] @ torch.cat(out)
        for position, h in enumerate(hidden):
            x = norm(h, w[f"{at}post_attention_layernorm.weight"])
            if i == 0:
                hidden[position] = h + unit(f"{at}mlp.", x)
                continue
            routed = route(x, w[f"{at}mlp.gate.weight"], w[f"{at}mlp.gate.expert_bias"])
            mixed = sum(share * unit(f"{at}mlp.experts.{e}.", x) for e, share in routed.items())
            hidden[position] = h + mixed + unit(f"{at}mlp.shared_experts.", x)
    return torch.stack([w["lm_head.weight"] @ norm(h, w["model.norm.weight"]) for h in hidden])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llada2")
    save_file(checkpoint(), path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> dllm.DiffusionModel:
    return dllm.load(folder)


def test_logits_are_those_of_the_description(model: dllm.DiffusionModel) -> None:
    ids = torch.randint(0, 60, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        result = model.hf(ids).logits[0]
        expected = reference(checkpoint(), ids[0].tolist())
    torch.testing.assert_close(result, expected, atol=2e-4, rtol=1e-4)


def test_facts(model: dllm.DiffusionModel) -> None:
    facts = model.facts
    assert (facts.mask_token_id, facts.eos_token_id, facts.logit_shift) == (63, 60, 0)
    assert (facts.mask_kind, facts.block_length) == ("block_causal", BLOCK)
    assert model.family.name == "llada2"


def test_it_is_saved_and_loaded(model: dllm.DiffusionModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved")
    again = dllm.load(tmp_path / "saved")
    assert again.facts == model.facts
    for name, weight in model.hf.state_dict().items():
        assert torch.equal(weight, again.hf.state_dict()[name]), name


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("num_experts", None, "lacks num_experts"), ("score_function", "softmax", "score_function")],
)
def test_other_configurations_are_refused(
    folder: Path, tmp_path: Path, field: str, value: Any, words: str
) -> None:
    config = {**CONFIG, field: value}
    if value is None:
        del config[field]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(checkpoint(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(dllm.CheckpointError, match=words):
        dllm.load(tmp_path)
