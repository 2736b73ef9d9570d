"""Quantised weights through transformers, where a CPU can run them and the package is there."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.moe import _default_apply_gate

import dllm
from dllm.kernels.quantised import QuantisedExperts, QuantisedLinear
from dllm.models.footprint import rounded_bytes
from dllm.models.llada2 import LLaDA2ForMaskedDiffusion, llada2_config
from dllm.models.quantisation import are_experts, read

from ..golden.conftest import goldens_dir
from ..thin import some
from . import test_families

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip


def test_a_gguf_file_becomes_a_diffusion_model(tmp_path: Path) -> None:
    """Read by transformers, handed over in memory: the numbers are those of the file."""
    pytest.importorskip("gguf")
    from .test_gguf import SIZES as LARGER
    from .test_gguf import write

    write(tmp_path / "model.gguf", "qwen2", {"": "Q8_0"})
    torch.manual_seed(0)
    original = Qwen2ForCausalLM(Qwen2Config(**LARGER)).eval()  # what was written
    network = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    model = dllm.load(network, family="a2d_qwen2", mask_token_id=95, eos_token_id=94)
    exact = dllm.load(original, family="a2d_qwen2", mask_token_id=95, eos_token_id=94)
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        got, wanted = model.hf(ids).logits, exact.hf(ids).logits
    apart = (got - wanted).abs().max() / wanted.abs().max()
    assert 0 < apart < 0.05  # eight bits, and not the numbers themselves
    out = dllm.generate(model, [1, 2, 3], max_new_tokens=8, block_length=8, cache="dual")
    assert 95 not in out.tokens


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny"])
def test_floats_of_8_bits_are_widened_to_one_dtype(tmp_path: Path, name: str) -> None:
    """On a CPU, whatever dtype the file has beside them; what is saved is no longer of 8 bits."""
    pytest.importorskip("accelerate")
    source = goldens_dir() / name
    held = {key: x.bfloat16() for key, x in load_file(source / "model.safetensors").items()}
    for key in [key for key, x in held.items() if x.ndim == 2 and "proj" in key]:
        small = held[key].to(torch.float8_e4m3fn)
        held |= {key: small, f"{key}_scale_inv": torch.full((1, 1), 2.0)}
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config |= {"torch_dtype": "float8_e4m3fn", "quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for dtype in ("auto", "float32"):
        model = dllm.load(tmp_path, dtype=dtype)
        wanted = torch.bfloat16 if dtype == "auto" else torch.float32
        assert {x.dtype for x in model.hf.parameters()} == {wanted}
        assert dllm.generate(model, [1, 2, 3], max_new_tokens=4).nfe
    key = next(key for key in held if key.endswith("_scale_inv")).removesuffix("_scale_inv")
    weight = model.hf.get_parameter(model.family.native_key(key))
    assert torch.equal(weight, held[key].float() * 2)
    model.save_pretrained(tmp_path / "saved", layout="official")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())


def test_packed_weights_are_unpacked_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """compressed-tensors would wait for a call of the whole network; the engine calls its parts."""
    given = []

    def read_as(*_: Any, config: Any, **__: Any) -> None:
        given.append(config.quantization_config)
        raise ImportError("compressed_tensors")

    monkeypatch.setattr(Qwen2ForCausalLM, "from_pretrained", read_as)
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(dllm.ConfigError, match="needs a package"):
        dllm.load(tmp_path, family="a2d_qwen2", mask_token_id=95)
    assert given == [how | {"dequantize": True}]


def test_packed_weights_in_memory_are_unpacked() -> None:
    unpacked: list[Any] = []
    hf: Any = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    hf.ct_decompress_hook = None
    hf.hf_quantizer = SimpleNamespace(compressor=SimpleNamespace(decompress_model=unpacked.append))
    dllm.load(hf, family="a2d_qwen2", mask_token_id=95)
    assert unpacked == [hf]


TORCHAO = """
import dllm, torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig

int8 = TorchAoConfig(Int8WeightOnlyConfig())
model = dllm.load("nano", quantization_config=int8, dtype="bfloat16")
assert "Int8" in type(model.hf.model.layers[0].mlp.up_proj.weight).__name__
assert type(model.head.weight) is torch.nn.Parameter  # the head stays as it is
for cache in ("none", "dual"):
    print(dllm.generate(model, "What is 23 + 12?", cache=cache).text)
try:
    model.save_pretrained("nowhere")
except dllm.ConfigError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_int8_decodes_and_keeps_its_head() -> None:
    """In a process of its own: importing that package warns, and warnings are errors here."""
    done = subprocess.run([sys.executable, "-c", TORCHAO], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, refused = done.stdout.splitlines()
    assert first == second and first.endswith("The answer is 35.") and "quantised" in refused


SETTINGS = ["int8", "int4", "int8(head=False)", "int4(group=32, embeddings=True)"]
QUESTION = "What is 23 + 12?"


@pytest.mark.parametrize(("how", "layout"), some(product(SETTINGS, ["native", "official"]), 1))
def test_a_rounded_model_is_saved_and_read_back_exactly(
    how: str, layout: str, tmp_path: Path
) -> None:
    model = dllm.load("nano", quantization=how, dtype="bfloat16")
    out = dllm.generate(model, QUESTION, cache="dual")
    assert out.text.endswith("The answer is 35.")
    model.save_pretrained(tmp_path, layout=layout)
    bits = 8 if how.startswith("int8") else 4
    held = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert held < 2_400_000 * (bits / 8 + 0.25)  # scales, and what stays in 16 bits
    again = dllm.load(tmp_path)
    state, expected = again.hf.state_dict(), model.hf.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert f"int{bits}" in repr(again) and "2.4M" in repr(again)
    same = dllm.generate(again, QUESTION, cache="dual")
    assert same.tokens == out.tokens and (same.logprobs == out.logprobs).all()


@pytest.mark.parametrize(
    ("how", "dtype"), some(product(["int8", "int4(group=32)"], ["float32", "bfloat16"]), 1)
)
def test_a_row_of_a_batch_is_the_row_alone(how: str, dtype: str) -> None:
    """To the last bit of its log-probabilities."""
    model = dllm.load("nano", quantization=how, dtype=dtype)
    prompts = [QUESTION, "Reverse this list: Tom, Anna, Ben", "Sort this list: Zoe, Ben"]
    for sampler, cache, steps in (("threshold", "dual", None), ("llada", "none", 8)):
        for prompt, row in zip(
            prompts,
            dllm.generate(model, prompts, sampler=sampler, cache=cache, steps=steps),
            strict=True,
        ):
            alone = dllm.generate(model, prompt, sampler=sampler, cache=cache, steps=steps)
            assert row.tokens == alone.tokens and row.order == alone.order
            assert (row.logprobs == alone.logprobs).all()


def test_one_matrix_at_both_ends_becomes_two(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tied = Qwen2ForCausalLM(Qwen2Config(**SIZES | {"tie_word_embeddings": True})).eval()
    given: dict[str, Any] = {"family": "a2d_qwen2", "mask_token_id": 95, "eos_token_id": 94}
    model = dllm.load(tied, quantization="int8", **given)
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        expected = model.hf(ids).logits
        model.save_pretrained(tmp_path)
        again = dllm.load(tmp_path)
        assert torch.equal(again.hf(ids).logits, expected)
    assert type(again.backbone.embed_tokens) is torch.nn.Embedding  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"quantization": "int3"}, "int4"),
        ({"quantization": "int4(group=48)"}, "32, 64, 128"),
        ({"quantization": "int8+int4"}, "names 2 quantizations"),
        (
            {"quantization": "int8", "device_map": "auto"},
            "leave quantization_config and device_map",
        ),
        ({"quantization": "int8", "device": "meta"}, "for a CPU"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(dllm.DllmError, match=says):
        dllm.load("nano", **given)


def test_nothing_is_rounded_twice(tmp_path: Path) -> None:
    model = dllm.load("nano", quantization="int8")
    with pytest.raises(dllm.ConfigError, match="loaded already"):
        dllm.load(model, quantization="int4")
    model.save_pretrained(tmp_path)
    with pytest.raises(dllm.ConfigError, match="stored quantised"):
        dllm.load(tmp_path, quantization="int4")


@pytest.mark.parametrize("how", SETTINGS)
@pytest.mark.parametrize("tied", [False, True])
def test_doctor_counts_the_bytes_that_are_held(how: str, tied: bool) -> None:
    config = Qwen2Config(**SIZES | {"tie_word_embeddings": tied})
    counted = rounded_bytes(Qwen2ForCausalLM(config), read(how), 2)
    given: dict[str, Any] = {"family": "a2d_qwen2", "mask_token_id": 95, "eos_token_id": 94}
    model = dllm.load(Qwen2ForCausalLM(config), quantization=how, dtype="bfloat16", **given)
    held = {value.data_ptr(): value.nbytes for value in model.hf.state_dict().values()}
    assert counted == sum(held.values())


def mixture(family: str, folder: Path, noisy: Any) -> None:
    """A checkpoint whose experts are wide enough to be rounded."""
    if family == "diffusion_gemma":
        noisy.save_pretrained(folder)
    elif family == "llada2":
        stated = json.loads((goldens_dir() / "llada2-tiny" / "config.json").read_text())
        hf = LLaDA2ForMaskedDiffusion(llada2_config(stated | {"moe_intermediate_size": 32}))
        given = {"family": "llada2", "block_length": 32, "mask_token_id": 255}
        dllm.load(hf, **given).save_pretrained(folder)  # type: ignore[arg-type]
    else:
        (case,) = (case for case in test_families.CASES if case.family == family)
        key = "expert_intermediate_size" if family == "llada_moe" else "moe_intermediate_size"
        native = case.native | {"moe_intermediate_size": 32}
        official = case.official | {key: 32, "mask_token_id": test_families.MASK}
        test_families.write(folder, replace(case, native=native, official=official))


MIXTURES = ("diffusion_gemma", "llada2", "llada_moe", "sdar_moe")


@pytest.mark.parametrize(("family", "how"), some(product(MIXTURES, ["int4(group=32)", "int8"]), 1))
def test_experts_are_rounded(
    family: str, how: str, tmp_path: Path, noisy: dllm.DiffusionModel
) -> None:
    """Each number to the nearest, the routers not; each row goes to its experts, whatever other
    rows do; the model is read back, and is as large as ``doctor`` says."""
    (tmp_path / "plain").mkdir()
    mixture(family, tmp_path / "plain", noisy)
    plain = dllm.load(tmp_path / "plain", dtype="float32")
    model = dllm.load(tmp_path / "plain", dtype="float32", quantization=how)
    layers = [(n, m) for n, m in model.hf.named_modules() if isinstance(m, QuantisedExperts)]
    assert layers and not any("router" in name for name, _ in model.hf.named_buffers())
    for name, experts in layers:
        before: Any = plain.hf.get_submodule(name)
        for part in ("gate_up_proj", "down_proj"):
            for one, wanted in zip(getattr(experts, part), getattr(before, part), strict=True):
                group = one.group or one.in_features
                steps = one.scale.float().repeat_interleave(group, 1)
                off = (one.weight - wanted).abs()
                # a scale has 8 bits, so a zero point as well: 8 of its steps are off by 2^-8 each
                assert (off <= steps * (0.5 if one.bits == 8 else 1)).all() and off.any()
        count = len(experts.down_proj)
        x = torch.randn(12, experts.down_proj[0].out_features)
        weights, chosen = torch.rand(12, count).topk(min(2, count))
        with torch.inference_mode():
            found = experts(x, chosen, weights)
            for row in range(12):
                total = torch.zeros_like(x[row])
                for expert, weight in sorted(zip(chosen[row].tolist(), weights[row], strict=True)):
                    gate, up = experts.gate_up_proj[expert](x[row : row + 1]).chunk(2, -1)
                    inner = experts.act_fn(gate) * up
                    total += experts.down_proj[expert](inner)[0] * weight
                assert torch.equal(found[row], total)
    model.save_pretrained(tmp_path / "saved")
    again = dllm.load(tmp_path / "saved")
    state, expected = again.hf.state_dict(), model.hf.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)
    buffers = {n for n, _ in plain.hf.named_buffers()}  # of the routers and layers: not weights
    held = sum(value.nbytes for name, value in state.items() if name not in buffers)
    assert held == rounded_bytes(plain.hf, read(how), 4)


def test_experts_of_another_kind_stay_as_they_are() -> None:
    """Those of GPT-OSS are transposed and have biases and a gate of their own."""
    hf = GptOssForCausalLM(GptOssConfig(**SIZES | {"num_local_experts": 4})).eval()
    kind = type(hf.model.layers[0].mlp.experts)
    dllm.load(hf, quantization="int8")
    assert type(hf.model.layers[0].mlp.experts) is kind
    assert isinstance(hf.model.layers[0].self_attn.q_proj, QuantisedLinear)
    normed = SimpleNamespace(
        gate_up_proj=nn.Parameter(torch.zeros(2, 64, 32)), is_transposed=False, has_bias=False,
        has_post_expert_norm=False, _apply_gate=_default_apply_gate,
    )  # fmt: skip
    assert are_experts(normed)  # type: ignore[arg-type]
    normed.has_post_expert_norm = True  # as those of Muse Spark
    assert not are_experts(normed)  # type: ignore[arg-type]
