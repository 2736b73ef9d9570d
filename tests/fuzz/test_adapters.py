"""Damaged folders of adapters: every one decodes, or fails with one sentence and leaves the model
as it was."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import dllm
from dllm.models import adapters
from dllm.models.adapters import CONFIG, WEIGHTS
from dllm.train.network import add_adapter

from ..thin import some
from . import damage as harm

FIELDS = ("peft_type", "r", "lora_alpha", "target_modules", "bias", "rank_pattern", "use_dora",
          "task_type", "modules_to_save", "layers_to_transform", "init_lora_weights",
          "auto_mapping", "base_model_name_or_path", "fan_in_fan_out")  # fmt: skip


def config_field(folder: Path, rng: random.Random) -> str:
    name, value = rng.choice(FIELDS), rng.choice(harm.HOSTILE)
    harm.rewrite(folder / CONFIG, lambda content: content.__setitem__(name, value))
    return f"{name}={value!r:.40}"


FAULTS = (config_field, config_field, *harm.OF_FILES)


@pytest.fixture(scope="module")
def base() -> dllm.DiffusionModel:
    return dllm.load("nano-ar")


@pytest.fixture(scope="module")
def adapter(base: dllm.DiffusionModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole one, of rank 2."""
    from peft import LoraConfig

    folder = tmp_path_factory.mktemp("adapter")
    hf: Any = dllm.load("nano-ar").hf
    hf.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    hf.save_pretrained(folder)
    assert (folder / WEIGHTS).is_file()
    return folder


def check(base: dllm.DiffusionModel, adapter: Path, folder: Path, seed: int) -> bool:
    """Load and decode with a damaged copy; whether it could be."""
    rng = random.Random(seed)
    shutil.copytree(adapter, folder)
    done = harm.damage(folder, rng, FAULTS, (1, 1, 1, 2))

    def read() -> None:
        model = dllm.load(base.hf, family="autoregressive", adapter=folder)
        dllm.speculate(model, None, [1, 2, 3], max_new_tokens=2)

    return harm.works(read, (seed, done))


@pytest.mark.fuzz(7)
def test_a_damaged_adapter_is_one_sentence(adapter: Path, tmp_path: Path, seeds: range) -> None:
    results = harm.of_each(
        seeds, tmp_path, lambda folder, seed: check(dllm.load("nano-ar"), adapter, folder, seed)
    )
    assert True in results and False in results


def test_a_model_is_usable_after_an_adapter_that_is_not_for_it(
    base: dllm.DiffusionModel, adapter: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "narrow"
    shutil.copytree(adapter, folder)
    from safetensors.torch import load_file, save_file

    held = load_file(folder / WEIGHTS)
    save_file({name: t[:, :-1].contiguous() for name, t in held.items()}, folder / WEIGHTS)
    ids = torch.tensor([[1, 2, 3]])
    hf: Any = base.hf
    before = hf(ids).logits
    with pytest.raises(dllm.CheckpointError, match="not for this network"):
        dllm.load(hf, family="autoregressive", adapter=folder)
    torch.testing.assert_close(hf(ids).logits, before, rtol=0, atol=0)
    assert not any("lora" in name for name, _ in hf.named_parameters())


@pytest.mark.parametrize(
    ("given", "words"),
    [(3, "a folder or a hub id"), ("/nope", "there is no folder"), (Path("nope"), "no folder")],
)
def test_what_is_no_folder(given: Any, words: str) -> None:
    with pytest.raises(dllm.DllmError, match=words):
        dllm.load("nano-ar", adapter=given)


def test_a_second_adapter_leaves_the_first_where_it_is(adapter: Path) -> None:
    model = dllm.load("nano-ar", adapter=adapter)
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        before = model.hf(ids).logits
        with pytest.raises(dllm.ConfigError, match="an adapter is on this model already"):
            dllm.load(model, adapter=adapter)
        assert torch.equal(model.hf(ids).logits, before)


@pytest.mark.filterwarnings("default")  # peft's own
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("kind", some([
    {"use_dora": True}, {"modules_to_save": ["lm_head", "norm"]},
    {"trainable_token_indices": [3, 4]}, {"target_modules": "all-linear", "use_rslora": True},
    {"target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 3}},
], 3))  # fmt: skip
def test_what_peft_computes_is_computed(kind: dict[str, Any], merge: bool, tmp_path: Path) -> None:
    """Also of the merged model that was saved."""
    from peft import LoraConfig, get_peft_model

    how: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False} | kind
    torch.manual_seed(0)
    hf: Any = dllm.load("nano-ar").hf
    peft = get_peft_model(hf, LoraConfig(**how)).eval()
    noise = torch.Generator().manual_seed(0)
    for parameter in peft.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=noise)
            parameter.data *= 0.3  # beyond that layers make much of what merging rounds
    peft.save_pretrained(tmp_path / "adapter")
    model = dllm.load("nano-ar", adapter=tmp_path / "adapter", merge_adapter=merge)
    ids = torch.arange(5, 20)[None]
    with torch.no_grad():
        wanted = peft(ids).logits
        torch.testing.assert_close(model.hf(ids).logits, wanted, rtol=0, atol=1e-3)
        if merge:
            model.save_pretrained(tmp_path / "merged")
            again = dllm.load(tmp_path / "merged", dtype="float32").hf(ids).logits
            torch.testing.assert_close(again, wanted, rtol=0, atol=1e-3)


def test_weights_of_an_adapter_that_have_no_place_are_not_dropped(
    adapter: Path, tmp_path: Path
) -> None:
    """Those of a deeper network, for one."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "deeper"
    shutil.copytree(adapter, folder)
    held = load_file(folder / WEIGHTS)
    held |= {n.replace("layers.0", "layers.40"): 1 * t for n, t in held.items() if "layers.0" in n}
    save_file(held, folder / WEIGHTS)
    with pytest.raises(dllm.CheckpointError, match=r"layers\.40\..* has no place in it"):
        dllm.load("nano-ar", adapter=folder)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("field", "value", "merge", "said"), [
    ("layer_replication", [[0, 2], [1, 2]], False, "sets layer_replication, which is not"),
    ("alora_invocation_tokens", [5, 6], False, "sets alora_invocation_tokens, which is not"),
    ("lora_bias", True, True, "Impossible to merge"),
])  # fmt: skip
def test_an_adapter_that_does_more_is_refused(
    field: str, value: Any, merge: bool, said: str, tmp_path: Path
) -> None:
    from peft import LoraConfig

    hf: Any = dllm.load("nano-ar").hf
    own = {field: value} if field == "lora_bias" else {}
    hf.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **own))
    hf.save_pretrained(tmp_path)
    harm.rewrite(tmp_path / CONFIG, lambda content: content.__setitem__(field, value))
    with pytest.raises(dllm.CheckpointError, match=said):
        dllm.load("nano-ar", adapter=tmp_path, merge_adapter=merge)


def test_an_adapter_on_a_stored_quantised_model_is_told(adapter: Path, tmp_path: Path) -> None:
    dllm.load("nano-ar", quantization="int8").save_pretrained(tmp_path)
    with pytest.raises(dllm.CheckpointError, match="where that is not quantised"):
        dllm.load(tmp_path, adapter=adapter)


def test_pickles_are_not_read(adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(adapter, folder)
    (folder / WEIGHTS).unlink()
    torch.save({}, folder / "adapter_model.bin")
    with pytest.raises(dllm.CheckpointError, match="only safetensors are loaded"):
        dllm.load("nano-ar", adapter=folder)


def test_a_peft_that_is_too_old_is_told(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MIN_PEFT_VERSION", "99.0")
    for call in (
        lambda: dllm.load("nano-ar", adapter=adapter),
        lambda: add_adapter(dllm.load("nano-ar").hf, 2, "all-linear"),
    ):
        with pytest.raises(dllm.ConfigError, match=r"^peft 99.0 or newer, .* is missing: pip"):
            call()


@pytest.mark.filterwarnings("default")  # peft's own
@pytest.mark.parametrize("merge", [False, True])
def test_tokens_that_are_trained_where_embedding_and_head_are_one(
    merge: bool, tmp_path: Path
) -> None:
    """peft saves them once."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=32, num_attention_heads=2, tie_word_embeddings=True, **shape)
    plain: Any = LlamaForCausalLM(config).eval()
    taught = LlamaForCausalLM(config).eval()
    taught.load_state_dict(plain.state_dict())
    how: dict[str, Any] = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9]}
    peft = get_peft_model(taught, LoraConfig(r=2, init_lora_weights=False, **how)).eval()
    for name, parameter in peft.named_parameters():
        parameter.data += "tokens_delta" in name
    peft.save_pretrained(tmp_path)
    model = dllm.load(plain, family="autoregressive", adapter=tmp_path, merge_adapter=merge)
    ids = torch.tensor([[3, 5, 9, 7]])
    with torch.no_grad():
        torch.testing.assert_close(model.hf(ids).logits, peft(ids).logits, rtol=0, atol=1e-4)
