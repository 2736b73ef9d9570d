"""What a loaded model is and does."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    HrmTextConfig,
    HrmTextForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dllm.core.errors import CheckpointError, ConfigError
from dllm.models import DiffusionModel, load
from dllm.models.forwards import CACHE

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def logits(model: DiffusionModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model.hf(ids).logits
    return out


def test_facts(llada: DiffusionModel, dream: DiffusionModel) -> None:
    a, b = llada.facts, dream.facts
    assert (a.mask_token_id, a.eos_token_id, a.pad_token_id) == (255, 250, 250)
    assert (b.mask_token_id, b.eos_token_id, b.pad_token_id) == (255, 250, 250)
    assert (a.bos_token_id, b.bos_token_id) == (None, 254)
    assert (a.logit_shift, b.logit_shift) == (0, 1)
    assert (a.score_source, b.score_source) == ("clean", "tempered")
    assert a.stop_token_ids == b.stop_token_ids == (250,)
    assert a.mask_kind == b.mask_kind == "bidirectional"
    assert (a.context_length, a.vocab_size) == (512, 256)


def test_a_model_shows_what_it_is(llada: DiffusionModel) -> None:
    assert repr(llada) == "<llada-tiny: llada, 175K parameters, float32 on cpu>"
    assert llada.backbone is llada.hf.model and llada.head is llada.hf.lm_head
    assert llada.tokenizer is None and not llada.hf.training
    assert (llada.dtype, llada.device) == (torch.float32, torch.device("cpu"))
    assert load(llada) is llada


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_autoregressive_model_stays_causal(attention: str) -> None:
    torch.manual_seed(0)
    model = load(LlamaForCausalLM(LlamaConfig(**TINY)), attn_implementation=attention)
    assert model.family.name == "autoregressive" and model.facts.mask_token_id is None
    assert (model.facts.mask_kind, model.facts.logit_shift) == ("causal", 1)
    ids = torch.arange(1, 13)[None]
    other = ids.clone()
    other[0, -1] = 33
    change = (logits(model, ids) - logits(model, other)).abs().amax(-1)[0]
    assert change[:-1].max() == 0 and change[-1] > 1e-4
    step = model.hf(ids[:, :8], use_cache=True)
    rest = model.hf(ids[:, 8:], **{CACHE: step[CACHE]}).logits
    torch.testing.assert_close(rest, logits(model, ids)[:, 8:], rtol=0, atol=1e-5)


def test_any_causal_model_of_transformers_is_a_verifier(tmp_path: Path) -> None:
    torch.manual_seed(0)
    hf = Qwen2ForCausalLM(Qwen2Config(**TINY, eos_token_id=[3, 4]))
    hf.save_pretrained(tmp_path)
    model = load(tmp_path)
    assert model.family.name == "autoregressive" and model.facts.stop_token_ids == (3, 4)
    ids = torch.arange(9)[None]
    with torch.inference_mode():  # transformers' activations have other last bits
        torch.testing.assert_close(logits(model, ids), hf.eval()(ids).logits, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigError, match=r"family='dream' \(shifted by one\)"):
        load(tmp_path, mask_token_id=5)


def test_layers_that_are_passed_several_times_are_in_the_files_once(tmp_path: Path) -> None:
    sizes = {**TINY, "head_dim": 8, "num_key_value_heads": 4}
    hf = HrmTextForCausalLM(HrmTextConfig(**sizes)).eval()  # type: ignore[no-untyped-call]
    hf.save_pretrained(tmp_path)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        wanted = hf(ids).logits
    torch.testing.assert_close(logits(load(tmp_path), ids), wanted, rtol=1e-5, atol=1e-6)


def test_other_hyperparameters_are_read_not_assumed(tmp_path: Path, checkpoints: Path) -> None:
    """Every size and constant of the config reaches the network."""
    config = json.loads((checkpoints / "llada-tiny" / "config.json").read_text())
    config |= {"d_model": 48, "n_heads": 6, "n_kv_heads": 2, "n_layers": 2, "mlp_hidden_size": 176,
               "rope_theta": 10000, "rms_norm_eps": 1e-6, "vocab_size": 250, "embedding_size": 256,
               "eos_token_id": 248, "pad_token_id": 248, "mask_token_id": 249}  # fmt: skip
    shapes = {"q_proj": (48, 48), "k_proj": (16, 48), "v_proj": (16, 48), "attn_out": (48, 48),
              "ff_proj": (176, 48), "up_proj": (176, 48), "ff_out": (48, 176),
              "attn_norm": (48,), "ff_norm": (48,)}  # fmt: skip
    stored = {f"model.transformer.blocks.{i}.{name}.weight": torch.randn(shape) * 0.1
              for i in range(2) for name, shape in shapes.items()}  # fmt: skip
    stored |= {f"model.transformer.{name}.weight": torch.randn(shape) * 0.1 for name, shape in
               {"wte": (256, 48), "ln_f": (48,), "ff_out": (256, 48)}.items()}  # fmt: skip
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path)
    c: Any = model.hf.config
    assert c.rope_parameters["rope_theta"] == 10000 and c.rms_norm_eps == 1e-6
    assert (model.facts.vocab_size, model.facts.mask_token_id) == (256, 249)
    assert torch.isfinite(logits(model, torch.arange(8)[None])).all()
    model.save_pretrained(tmp_path / "again", layout="official")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config


def test_a_scaled_rotation_is_read_under_its_old_name(copy: Any) -> None:
    folder = copy("dream-tiny", rope_scaling={"type": "linear", "factor": 2.0})
    rotary: Any = load(folder).backbone.rotary_emb
    assert rotary.rope_type == "linear" and rotary.inv_freq[0] == 0.5
    shutil.rmtree(folder)  # a file of a new transformers, to which somebody added an old entry
    new = {"rope_type": "default", "rope_theta": 100.0}
    folder = copy("dream-tiny", ("rope_theta",), rope_scaling={"type": "linear", "factor": 2.0},
                  rope_parameters=new)  # fmt: skip
    rotary = load(folder).backbone.rotary_emb
    assert rotary.inv_freq[0] == 0.5 and rotary.config.rope_parameters["rope_theta"] == 100


def test_a_rotation_that_depends_on_company_is_refused(copy: Any) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0}
    long = {"rope_type": "longrope", "original_max_position_embeddings": 32, **factors}
    with pytest.raises(ConfigError, match="'longrope' rotates a text as the longest"):
        load(copy("dream-tiny", rope_scaling=long))
    folder = copy("llada-tiny")
    load(folder).save_pretrained(folder)
    fields = json.loads((folder / "config.json").read_text())
    fields["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(fields))
    assert load(folder).facts.context_length == 512  # up to there nothing is scaled
    with pytest.raises(ConfigError, match="'dynamic' rotates a text as the longest"):
        load(folder, context_length=1024)


def test_windows_that_no_packed_row_has_are_refused(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    Qwen2ForCausalLM(Qwen2Config(**TINY, **window)).save_pretrained(tmp_path)
    given: dict[str, Any] = {"family": "a2d_qwen2", "mask_token_id": 63}
    with pytest.raises(CheckpointError, match="see 8 positions only"):
        load(tmp_path, **given)
    assert load(tmp_path, **given, context_length=8).facts.context_length == 8
    assert load(tmp_path).family.name == "autoregressive"


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("name", ["llada", "dream"])
def test_a_model_from_a_config_alone(tmp_path: Path, name: str, tie: bool) -> None:
    torch.manual_seed(0)
    cls = {"llada": LlamaForCausalLM, "dream": Qwen2ForCausalLM}[name]
    config = cls.config_class(**TINY, tie_word_embeddings=tie, eos_token_id=1, pad_token_id=1)
    hf = cls(config)
    model = load(hf, family=name, mask_token_id=63)
    ids = torch.arange(10)[None]
    expected = logits(model, ids)
    for layout in ("native", "official"):
        model.save_pretrained(tmp_path / layout, layout=layout)
        again = load(tmp_path / layout)
        assert again.facts == model.facts and again.family is model.family
        assert torch.equal(logits(again, ids), expected)


def test_threads_load_at_the_same_time(checkpoints: Path) -> None:
    """transformers loads with a default dtype and patches that are the whole process's."""
    kinds, found, before = ("float32", "bfloat16", "float16"), [], sys.getswitchinterval()

    def each(dtype: str) -> None:
        for _ in range(4):
            hf = load(checkpoints / "llada-tiny", dtype=dtype).hf
            found.append((dtype, {str(x.dtype)[6:] for x in hf.parameters()}))

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(kinds)) as pool:
            list(pool.map(each, kinds))
    finally:
        sys.setswitchinterval(before)
    assert sorted(found, key=str) == sorted(((k, {k}) for k in 4 * kinds), key=str)
    assert torch.get_default_dtype() == torch.float32


def test_a_loaded_network_is_accepted(dream: DiffusionModel) -> None:
    with pytest.raises(ConfigError, match="shifted"):
        load(Qwen2ForCausalLM(Qwen2Config(**TINY)), mask_token_id=5)
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM"):
        load(LlamaForCausalLM(LlamaConfig(**TINY)), family="dream", mask_token_id=5)
    with pytest.raises(CheckpointError, match="mask_token_id"):
        load(LlamaForCausalLM(LlamaConfig(**TINY)), family="llada")
    config = LlamaConfig(**TINY)
    config.is_causal = False
    assert load(LlamaForCausalLM(config), mask_token_id=5).family.name == "llada"
    with pytest.raises(ConfigError, match="loaded already"):
        load(LlamaForCausalLM(config), mask_token_id=5, revision="main")


@pytest.mark.parametrize("family", ["autoregressive", "a2d_qwen2"])
def test_a_network_that_is_cast_keeps_its_rotation(family: str) -> None:
    """Of any kind: frequencies in half precision are others."""
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    hf = Qwen2ForCausalLM(Qwen2Config(**TINY, rope_parameters=scaled))
    rotary: Any = hf.model.rotary_emb
    exact = rotary.inv_freq.clone()
    load(hf, dtype="bfloat16", family=family, mask_token_id=5, eos_token_id=3)
    assert torch.equal(rotary.inv_freq, exact) and torch.equal(rotary.original_inv_freq, exact)


def test_plain_weights_follow_the_family_they_are_given(tmp_path: Path) -> None:
    Qwen2ForCausalLM(Qwen2Config(**TINY, eos_token_id=1)).save_pretrained(tmp_path)
    model = load(tmp_path, family="dream", mask_token_id=60, pad_token_id=2, logit_shift=0)
    assert (model.facts.mask_token_id, model.facts.pad_token_id) == (60, 2)
    assert model.facts.logit_shift == 0 and model.hf.config.is_causal is False


def test_plain_weights_without_a_causal_mask_need_a_family(tmp_path: Path) -> None:
    config = LlamaConfig(**TINY)
    config.is_causal = False
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="say which family"):
        load(tmp_path)
    assert load(tmp_path, family="llada", mask_token_id=9).facts.logit_shift == 0


def test_generation_defaults_come_from_the_checkpoint(copy: Any) -> None:
    folder = copy("llada-tiny", dllm={"family": "llada", "generation": {"block_length": 32}})
    (folder / "generation_config.json").write_text('{"max_new_tokens": 64, "temperature": 0.5}')
    defaults = load(folder).generation_defaults
    assert defaults == {"max_new_tokens": 64, "block_length": 32}


def test_an_adapter_of_the_official_network_is_put_on_ours(
    checkpoints: Path, tmp_path: Path
) -> None:
    """As D2F's for LLaDA, whose layers have official names."""
    pytest.importorskip("peft")
    plain = load(checkpoints / "llada-tiny")
    hidden = plain.hf.config.hidden_size
    low, high = torch.randn(2, hidden) / 8, torch.randn(hidden, 2) / 8
    name = "base_model.model.model.transformer.blocks.0.attn_out"
    save_file({f"{name}.lora_A.weight": low, f"{name}.lora_B.weight": high},
              tmp_path / "adapter_model.safetensors")  # fmt: skip
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["attn_out"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model = load(checkpoints / "llada-tiny", adapter=tmp_path, merge_adapter=True)
    before, after = (m.hf.get_submodule("model.layers.0.self_attn.o_proj") for m in (plain, model))
    torch.testing.assert_close(after.weight, before.weight + 2 * high @ low)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {"x": 8}}))
    with pytest.raises(CheckpointError, match="alpha_pattern has names"):
        load(checkpoints / "llada-tiny", adapter=tmp_path)
