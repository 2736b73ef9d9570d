"""Families beside LLaDA, Dream and LLaDA2: tiny random checkpoints in the official layout.

What a family must compute is stated without it: the base class of transformers, the same weights,
and a mask written out position by position.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import dllm
from dllm.core.errors import CheckpointError
from dllm.models import families

VOCAB, MASK, EOS = 96, 95, 94
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "initializer_range": 0.3,
}  # fmt: skip
ROPE = {"rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Case:
    """A family, the network that it is, and a config.json as its release writes one."""

    family: str
    network: type[PreTrainedModel]
    native: dict[str, Any]  # of the network's own config, beside SIZES
    official: dict[str, Any]  # of config.json, beside SIZES
    block: int | None = None  # of its attention
    given: tuple[tuple[str, Any], ...] = (("mask_token_id", MASK),)
    renamed: Callable[[str], str] = str


def head_dim(size: int = 16) -> dict[str, Any]:
    return {"head_dim": size}


def nemotron_name(key: str) -> str:
    return "diffusion_head.weight" if key == "lm_head.weight" else "encoder." + key[len("model.") :]


CASES = [
    Case("a2d_llama", LlamaForCausalLM, {"tie_word_embeddings": True},
         {"architectures": ["A2DLlamaLMHeadModel"], "model_type": "a2d-llama",
          "tie_word_embeddings": True}),
    Case("a2d_qwen2", Qwen2ForCausalLM, head_dim(),
         {"architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2", **head_dim(),
          "tie_word_embeddings": False, "use_sliding_window": False}),
    Case("a2d_qwen3", Qwen3ForCausalLM, head_dim() | {"tie_word_embeddings": True},
         {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3", **head_dim(),
          "tie_word_embeddings": True, "layer_types": ["full_attention"] * 2,
          "attention_bias": False, "auto_map": {"AutoModel": "modeling_qwen3.X"}}),
    Case("a2d_qwen3", Qwen3ForCausalLM, head_dim() | {"tie_word_embeddings": True},
         {"architectures": ["A2DQwen3LMHeadModel"], "model_type": "a2d-qwen3", **head_dim(),
          "tie_word_embeddings": True}, block=8,
         given=(("mask_token_id", MASK), ("block_length", 8))),
    Case("illada", LlamaForCausalLM, {"tie_word_embeddings": True},
         {"architectures": ["ILLaDAForCausalLM"], "model_type": "illada", "layer_norm_eps": None,
          "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
          "resid_pdrop": 0.0}),
    Case("stable_diffcoder", LlamaForCausalLM, {},
         {"architectures": ["StableDiffcoderForCausalLM"], "model_type": "llama",
          "tie_word_embeddings": False}, block=4),
    Case("sdar", Qwen3ForCausalLM, head_dim(),
         {"architectures": ["SDARForCausalLM"], "model_type": "sdar", **head_dim(),
          "tie_word_embeddings": False, "block_size": 4}, block=4),
    Case("fast_dllm_v2", Qwen2ForCausalLM, {},
         {"architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen",
          "tie_word_embeddings": False, "bd_size": 32}, block=32),
    Case("llada_moe", Qwen3MoeForCausalLM,
         head_dim(8) | EXPERTS | {"moe_intermediate_size": 24, "norm_topk_prob": False,
                                  "mlp_only_layers": [0], "num_key_value_heads": 4},
         {"architectures": ["LLaDAMoEModelLM"], "model_type": "llada", "qk_layernorm": True,
          "expert_intermediate_size": 24, "dense_intermediate_size": 48, "norm_topk_prob": True,
          "moe_layer_freq": [0, 1], "num_key_value_heads": 4, "partial_rotary_factor": 1,
          "moe_router_score_function": "softmax", **EXPERTS}),
    Case("sdar_moe", Qwen3MoeForCausalLM,
         head_dim() | EXPERTS | {"moe_intermediate_size": 24, "norm_topk_prob": True},
         {"architectures": ["SDARMoeForCausalLM"], "model_type": "sdar_moe", **head_dim(),
          "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 1,
          "block_size": 4, **EXPERTS}, block=4),
    Case("nemotron", Ministral3ForCausalLM, head_dim() | {"rope_parameters": YARN},
         {"architectures": ["NemotronLabsDiffusionModel"], "model_type": "nemotron_labs_diffusion",
          **head_dim(), "rope_parameters": YARN, "tie_word_embeddings": False, "block_size": 32,
          "dlm_paradigm": "bidirectional", "attention_bias": False, "mlp_bias": False},
         block=32, renamed=nemotron_name),
]  # fmt: skip
CONFIGS = {
    LlamaForCausalLM: LlamaConfig, Qwen2ForCausalLM: Qwen2Config, Qwen3ForCausalLM: Qwen3Config,
    Qwen3MoeForCausalLM: Qwen3MoeConfig, Ministral3ForCausalLM: Ministral3Config,
}  # fmt: skip
each = pytest.mark.parametrize(
    "case", CASES, ids=[f"{c.family}{'' if c.block is None else f'-{c.block}'}" for c in CASES]
)


def network(case: Case) -> Any:
    torch.manual_seed(5)
    own = {"rope_parameters": {"rope_type": "default", **ROPE}, "tie_word_embeddings": False}
    config = CONFIGS[case.network](**{**SIZES, **own, **case.native})
    config._attn_implementation = "eager"
    made = case.network(config).eval()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("norm.weight"):
                weight.add_(torch.randn_like(weight) * 0.2)
            elif name.endswith("bias"):
                weight.copy_(torch.randn_like(weight) * 0.2)
    return made


def official(hf: Any, case: Case) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of the release, every expert by itself."""
    for name, weight in hf.state_dict().items():
        if name in hf.all_tied_weights_keys and hf.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for e, both in enumerate(weight):
                gate, up = both.chunk(2)
                prefix = name.removesuffix("gate_up_proj")
                yield f"{prefix}{e}.gate_proj.weight", gate
                yield f"{prefix}{e}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            for e, down in enumerate(weight):
                yield f"{prefix}{e}.down_proj.weight", down
        else:
            yield case.renamed(name), weight


def write(folder: Path, case: Case) -> Any:
    hf = network(case)
    weights = {name: weight.clone().contiguous() for name, weight in official(hf, case)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**SIZES, **({} if "rope_parameters" in case.official else ROPE), **case.official}
    config |= {"eos_token_id": EOS, "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    return hf


def mask(length: int, block: int | None) -> Tensor:
    """(1, 1, L, L) added to the scores: a position sees its own block and those before it."""
    hidden = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        for key in range(length):
            hidden[query, key] = block is not None and key // block > query // block
    return torch.zeros(1, 1, length, length).masked_fill(hidden, float("-inf"))


def logits(hf: Any, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.inference_mode():
        out: Tensor = hf(ids, **inputs).logits
    return out


@each
def test_a_family_computes_decodes_and_is_saved(tmp_path: Path, case: Case) -> None:
    """Logits are those of the network under its mask.  The exact cache of a block-causal model
    changes nothing; others run without one.  Saved and loaded it is the same."""
    reference = write(tmp_path, case)
    model = dllm.load(tmp_path, **dict(case.given))
    assert model.family.name == case.family and type(model.hf) is case.network
    ids = torch.randint(0, 90, (1, 44), generator=torch.Generator().manual_seed(1))
    expected = logits(reference, ids, attention_mask=mask(44, case.block), use_cache=False)
    found = logits(model.hf, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    causal = logits(reference, ids, use_cache=False)
    assert (causal - expected).abs().max() > 1e-2  # the mask matters
    facts = model.facts
    kind = "bidirectional" if case.block is None else "block_causal"
    kind = "causal_prefix" if case.family == "nemotron" else kind
    assert (facts.mask_kind, facts.block_length) == (kind, case.block)
    assert (facts.mask_token_id, facts.eos_token_id, facts.vocab_size) == (MASK, EOS, VOCAB)
    assert facts.logit_shift == (case.family == "fast_dllm_v2")
    how: Any = {"sampler": "fixed(n=4)", "max_new_tokens": 40, "eos_policy": "none"}
    plain = dllm.generate(model, [5, 9, 17, 40, 3], **how)
    other = dllm.generate(model, [5, 9, 17, 40, 3], cache="block" if case.block else "none", **how)
    assert plain.tokens == other.tokens and MASK not in plain.tokens
    assert not case.block or other.computed < plain.computed
    model.save_pretrained(tmp_path / "saved")
    again = dllm.load(tmp_path / "saved")
    assert again.facts == facts and again.family is model.family
    assert torch.equal(logits(again.hf, ids), found)


def test_published_checkpoints_bring_what_their_files_leave_out(tmp_path: Path) -> None:
    """bd3lm and mdlm have the same config.json: the name says which attends in blocks."""
    lengths = {}
    for name in ("Qwen3-0.6B-diffusion-bd3lm-v0.1", "Qwen3-0.6B-diffusion-mdlm-v0.1", "OPDLM-4B"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, CASES[2])
        lengths[name] = dllm.load(tmp_path / name, mask_token_id=MASK).facts.block_length
    assert list(lengths.values()) == [32, None, 4]
    cached = tmp_path / f"models--divelab--{name}" / "snapshots" / "0f3a"  # by its path in a cache
    cached.mkdir(parents=True)
    write(cached, CASES[2])
    model = dllm.load(cached, mask_token_id=MASK)
    assert (model.name, model.facts.block_length) == (name, 4)
    assert dllm.load(tmp_path / name, mask_token_id=MASK, block_length=8).facts.block_length == 8


def test_sdar_checkpoints_may_leave_out_their_blocks(tmp_path: Path) -> None:
    case = next(case for case in CASES if case.family == "sdar")
    case = replace(case, official={k: v for k, v in case.official.items() if k != "block_size"})
    for name in ("SDAR-8B-Chat", "mine"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, case)
    assert dllm.load(tmp_path / "SDAR-8B-Chat", mask_token_id=MASK).facts.block_length == 4
    with pytest.raises(dllm.CheckpointError, match=r"block_length is None .*block_length=\.\.\."):
        dllm.load(tmp_path / "mine", mask_token_id=MASK)
    assert dllm.load(tmp_path / "mine", mask_token_id=MASK, block_length=8).facts.block_length == 8


def test_a_vocabulary_names_the_mask_and_what_fills_the_rest(tmp_path: Path) -> None:
    """Of Fast-dLLM v2 no file declares the mask; DiffuCoder's tokenizer has a filler of its own."""
    case = next(case for case in CASES if case.family == "fast_dllm_v2")
    write(tmp_path, case)
    named = {"<|im_end|>": EOS, "|<MASK>|": MASK, "<|pad|>": 7}
    words = {f"w{i}": i for i in range(VOCAB) if i not in named.values()}
    tokenizer = Tokenizer(models.WordLevel(named | words, unk_token="w0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>")
    facts = dllm.load(tmp_path, tokenizer=fast).facts
    assert (facts.mask_token_id, facts.stop_token_ids) == (MASK, (EOS, 7))
    assert fast.mask_token == "|<MASK>|"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w0")
    assert dllm.load(tmp_path, tokenizer=fast).facts.stop_token_ids == (EOS,)


def test_seed_models_know_their_mask_by_their_vocabulary(tmp_path: Path) -> None:
    case = CASES[4]
    assert case.family == "illada"
    own = {**case.native, "vocab_size": 155136, "hidden_size": 8, "head_dim": 2}
    hf = network(replace(case, native=own))
    weights = {name: weight.clone() for name, weight in official(hf, case)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = SIZES | ROPE | case.official | {"vocab_size": 155136, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    facts = dllm.load(tmp_path).facts
    assert (facts.mask_token_id, facts.eos_token_id) == (5, 2)


def test_the_causal_half_of_nemotron_verifies(tmp_path: Path) -> None:
    reference = write(tmp_path, CASES[-1])
    model = dllm.load(tmp_path, family="nemotron_causal")
    ids = torch.randint(0, 90, (1, 30), generator=torch.Generator().manual_seed(2))
    assert (model.facts.mask_kind, model.facts.mask_token_id) == ("causal", None)
    torch.testing.assert_close(
        logits(model.hf, ids), logits(reference, ids), rtol=1e-4, atol=1e-4
    )  # fmt: skip


def test_plain_weights_and_other_names_can_be_tried(tmp_path: Path) -> None:
    """A family that is named reads the network's own layout, and its official one renamed."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "renamed").mkdir()
    hf = network(CASES[2])
    hf.save_pretrained(tmp_path / "plain")
    with pytest.raises(dllm.ConfigError, match=r"family='a2d_qwen3' \(in place\)"):
        dllm.load(tmp_path / "plain", mask_token_id=MASK)
    model = dllm.load(tmp_path / "plain", family="a2d_qwen3", mask_token_id=MASK, eos_token_id=EOS)
    assert model.facts.mask_kind == "bidirectional"
    write(tmp_path / "renamed", CASES[4])
    config = json.loads((tmp_path / "renamed" / "config.json").read_text())
    config |= {"architectures": ["MyLM"], "model_type": "mine"}
    (tmp_path / "renamed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(dllm.CheckpointError, match=r"try family=.* write a dllm.models.Family"):
        dllm.load(tmp_path / "renamed")
    assert dllm.load(tmp_path / "renamed", family="illada", mask_token_id=MASK).facts.eos_token_id
    with pytest.raises(dllm.CheckpointError, match=r"no sdar checkpoint: .* lacks head_dim"):
        dllm.load(tmp_path / "renamed", family="sdar", mask_token_id=MASK)


def test_blocks_are_refused_where_a_family_has_none(tmp_path: Path) -> None:
    write(tmp_path, CASES[4])
    sentence = r"block_length is 8 .*'illada', whose attention is bidirectional; leave it out"
    with pytest.raises(dllm.CheckpointError, match=sentence):
        dllm.load(tmp_path, mask_token_id=MASK, block_length=8)


def test_a2d_answers_without_thinking_unless_asked(tmp_path: Path) -> None:
    vocabulary = {f"w{i}": i for i in range(VOCAB - 2)} | {"<|im_end|>": EOS, "<|mask|>": MASK}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = (
        "{% if enable_thinking is defined and enable_thinking is false %}no{% else %}yes{% endif %}"
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="<|mask|>",
                                   chat_template=template)  # fmt: skip
    write(tmp_path, CASES[2])
    model = dllm.load(tmp_path, tokenizer=fast)
    assert model.facts.mask_token_id == MASK  # from the tokenizer
    chat = [{"role": "user", "content": "w1"}]
    shown: Any = model.tokenizer
    assert shown.apply_chat_template(chat, tokenize=False) == "no"
    assert shown.apply_chat_template(chat, tokenize=False, enable_thinking=True) == "yes"


def test_every_family_has_a_case() -> None:
    elsewhere = {"llada", "dream", "llada2", "autoregressive", "nemotron_causal", "wedlm",
                 "wedlm_qwen2", "dreamon", "diffusion_gemma"}  # fmt: skip
    assert {case.family for case in CASES} | elsewhere >= set(families())


@pytest.mark.parametrize("case", [case for case in CASES if case.family.startswith("sdar")])
def test_sdar_with_causal_attention_is_refused(tmp_path: Path, case: Case) -> None:
    """As I-DLM's checkpoints say it, which have SDAR's class and predict the token behind."""
    changed = {**case.official, "use_regular_causal": True}
    write(tmp_path, replace(case, official=changed))
    with pytest.raises(CheckpointError, match="with use_regular_causal=False only"):
        dllm.load(tmp_path, **dict(case.given))
