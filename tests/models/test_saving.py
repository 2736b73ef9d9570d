"""Save, load, compare: nothing may change."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dllm.core.errors import CheckpointError, ConfigError, UnknownNameError
from dllm.models import DiffusionModel, load

NAMES = ("llada-tiny", "dream-tiny")


def same(a: DiffusionModel, b: DiffusionModel) -> bool:
    x, y = a.hf.state_dict(), b.hf.state_dict()
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x) and a.facts == b.facts


@pytest.mark.parametrize("layout", ["native", "official"])
@pytest.mark.parametrize(
    ("name", "dtype", "shards"),
    [*((name, "float32", 1) for name in NAMES), ("llada-tiny", "bfloat16", 3)],
)
def test_round_trip(
    checkpoints: Path, tmp_path: Path, name: str, dtype: str, shards: int, layout: str
) -> None:
    model = load(checkpoints / name, dtype=dtype)
    size = sum(weight.nbytes for weight in model.hf.state_dict().values())
    model.save_pretrained(tmp_path, layout=layout, max_shard_size=size // shards + 1)
    assert len([*tmp_path.glob("*.safetensors")]) >= shards
    again = load(tmp_path)
    assert same(model, again) and again.family is model.family
    assert again.dtype == model.dtype
    changed = {} if dtype == "float32" or layout == "native" else {"torch_dtype": dtype}
    assert again.official_config == model.official_config | changed
    assert load(tmp_path, dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_the_official_layout_is_the_original_one(
    checkpoints: Path, tmp_path: Path, name: str
) -> None:
    """Also on the way through the native layout."""
    load(checkpoints / name).save_pretrained(tmp_path / "native")
    load(tmp_path / "native").save_pretrained(tmp_path / "official", layout="official")
    original = json.loads((checkpoints / name / "config.json").read_text())
    assert json.loads((tmp_path / "official" / "config.json").read_text()) == original
    stored = load_file(checkpoints / name / "model.safetensors")
    written = load_file(tmp_path / "official" / "model.safetensors")
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[key], written[key]) for key in stored)


def test_a_changed_fact_is_written(checkpoints: Path, tmp_path: Path) -> None:
    load(checkpoints / "dream-tiny", eos_token_id=7).save_pretrained(tmp_path, layout="official")
    assert load(tmp_path).facts.eos_token_id == 7


def test_no_trace_of_the_machine(llada: DiffusionModel, tmp_path: Path) -> None:
    llada.save_pretrained(tmp_path)
    assert "/" not in (tmp_path / "config.json").read_text()


def test_refusals(llada: DiffusionModel, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'official'"):
        llada.save_pretrained(tmp_path, layout="offical")
    from transformers import LlamaConfig, LlamaForCausalLM

    tiny = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                       num_attention_heads=1)  # fmt: skip
    model = load(LlamaForCausalLM(tiny))
    with pytest.raises(ConfigError, match="no official layout"):
        model.save_pretrained(tmp_path, layout="official")
    model.save_pretrained(tmp_path / "ar")
    assert load(tmp_path / "ar").family.name == "autoregressive"
    for size in ("5XB", "", None):
        with pytest.raises(ConfigError, match="max_shard_size is a number of bytes or a text"):
            model.save_pretrained(tmp_path / "ar", max_shard_size=size)  # type: ignore[arg-type]


def test_a_scaled_rotation_has_no_official_llada_layout(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, rope_parameters=rope,
    ))  # fmt: skip
    model = load(hf, family="llada", mask_token_id=7, eos_token_id=2)
    with pytest.raises(CheckpointError, match="rope_type='linear'; LLaDA"):
        model.save_pretrained(tmp_path, layout="official")
    model.save_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    assert torch.equal(load(tmp_path).hf(ids).logits, model.hf(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_ends_that_are_tied_otherwise_than_their_config_says(tied: bool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, tie_word_embeddings=tied,
    ))  # fmt: skip
    model, other = load(hf), torch.nn.Parameter(torch.randn(8, 8))
    hf.lm_head.weight = other if tied else hf.model.embed_tokens.weight
    if tied:
        with pytest.raises(ConfigError, match="differs from"):
            model.save_pretrained(tmp_path)
        hf.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    ids = torch.arange(8)[None]
    assert torch.equal(load(tmp_path).hf(ids).logits, hf(ids).logits)
