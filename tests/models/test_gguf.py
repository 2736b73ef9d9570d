"""GGUF files of LLaDA and Dream networks, against the numbers that the package gguf reads."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import dllm
from dllm.cli.doctor import examine
from dllm.core.errors import CheckpointError
from dllm.kernels.quantised import QuantisedLinear
from dllm.models import gguf as own
from dllm.models.footprint import gguf_footprint

gguf = pytest.importorskip("gguf")
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
NAMES = {native: name for name, native in {**own.OUTER, **own.INNER}.items()}


def random_blocks(kind: Any, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Bytes of a matrix in blocks that the package reads but does not write."""
    size, width = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(shape[0])
    blocks = generator.integers(0, 256, (shape[0], shape[1] // size, width), dtype=np.uint8)
    at = slice(0, 4) if kind.name == "Q4_K" else slice(width - 2, width)  # the scales
    scales = generator.uniform(0.5, 1.0, (*blocks.shape[:2], (at.stop - at.start) // 2)) * 1e-3
    blocks[..., at] = scales.astype(np.float16).view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write(file: Path, kind: str, types: dict[str, str]) -> dict[str, np.ndarray[Any, Any]]:
    """A random network whose linear layers have the ``types`` by the end of their names ("": the
    rest); its numbers as gguf reads them, by native name."""
    torch.manual_seed(0)
    config, network = {
        "llada": (LlamaConfig, LlamaForCausalLM), "dream": (Qwen2Config, Qwen2ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    }[kind]  # fmt: skip
    hf = network(config(**SIZES)).eval()
    writer = gguf.GGUFWriter(file, kind)
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_mask_token_id(95)
    writer.add_eos_token_id(94)
    if kind == "qwen2":  # transformers wants a tokenizer
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"w{i}" for i in range(96)])
    held = {}
    for key, weight in hf.state_dict().items():
        inner, _, attribute = key.rpartition(".")
        layer = "" if "layers" not in key else f"blk.{key.split('.')[2]}."
        name = NAMES[inner.split(".", 3)[3] if layer else inner]
        numbers = weight.float().numpy()
        wanted = (
            next(types[end] for end in types if key.endswith(end)) if weight.ndim > 1 else "F32"
        )
        quantisation = gguf.GGMLQuantizationType[wanted]
        if wanted in ("Q4_K", "Q6_K"):
            data = random_blocks(quantisation, numbers.shape)
        else:
            data = gguf.quants.quantize(numbers, quantisation)
        writer.add_tensor(f"{layer}{name}.{attribute}", data, raw_dtype=quantisation)
        numbers = gguf.dequantize(data, quantisation).reshape(numbers.shape)
        if kind == "llada" and ("q_proj" in key or "k_proj" in key):  # as llama.cpp rotates
            heads = 4 if "q_proj" in key else 2
            numbers = np.concatenate([
                np.concatenate((head[::2], head[1::2])) for head in np.split(numbers, heads)
            ])  # fmt: skip
        held[key] = numbers
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file,
                 writer.write_tensors_to_file, writer.close):  # fmt: skip
        step()
    return held


@pytest.mark.parametrize("kind", ["llada", "dream"])
@pytest.mark.parametrize(
    "types",
    [{"": "Q8_0"}, {"": "Q4_0"}, {"lm_head.weight": "Q6_K", "": "Q4_K"}, {"": "F16"}, {"": "BF16"}],
)
def test_every_number_of_the_file(
    kind: str, types: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = write(tmp_path / "small.gguf", kind, types)
    with caplog.at_level(logging.INFO, "dllm"):
        model = dllm.load(tmp_path / "small.gguf", dtype="float32")
    assert model.family.name == kind and model.facts.mask_token_id == 95
    layers = dict(model.hf.named_modules())
    for key, numbers in held.items():
        inner, _, attribute = key.rpartition(".")
        got = getattr(layers[inner], attribute).float().numpy()
        most = np.abs(numbers).max()
        # 4 bits: scales in bfloat16; 8 bits: half a step of a row of its own
        np.testing.assert_allclose(got, numbers, rtol=0, atol=most * 0.01, err_msg=key)
    four = types[""] in ("Q4_0", "Q4_K")
    projection = layers["model.layers.1.mlp.up_proj"]
    if types[""] in ("F16", "BF16"):
        assert type(projection) is torch.nn.Linear
    else:
        assert isinstance(projection, QuantisedLinear) and projection.bits == (4 if four else 8)
        says = f"{types['']} as int{4 if four else 8}"
        assert any(says in line for line in caplog.messages), caplog.messages
        assert any("widened to float32" in line for line in caplog.messages)  # the embeddings
        with pytest.raises(dllm.ConfigError, match="only form"):
            model.save_pretrained(tmp_path)
    out = dllm.generate(model, [1, 2, 3], max_new_tokens=8, block_length=8, cache="dual")
    assert len(out.tokens) <= 8 and 95 not in out.tokens


def test_what_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(dllm.CheckpointError, match="no file"):
        dllm.load(tmp_path / "missing.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(dllm.CheckpointError):
        dllm.load(tmp_path / "broken.gguf")
    write(tmp_path / "good.gguf", "llada", {"": "Q8_0"})
    with pytest.raises(dllm.ConfigError, match="leave quantization out"):
        dllm.load(tmp_path / "good.gguf", quantization="int8")
    for how in ({"revision": "main"}, {"device_map": "auto"}, {"load_in_8bit": True}):
        with pytest.raises(dllm.ConfigError, match="is a GGUF file: revision"):
            dllm.load(tmp_path / "good.gguf", **how)
    data = (tmp_path / "good.gguf").read_bytes()
    (tmp_path / "other.gguf").write_bytes(data.replace(b"llada", b"gemma"))
    with pytest.raises(dllm.CheckpointError, match=r"gemma.*\(FOLDER, gguf_file=NAME"):
        dllm.load(tmp_path / "other.gguf")
    (tmp_path / "short.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(dllm.CheckpointError):
        dllm.load(tmp_path / "short.gguf")


def changed(file: Path, values: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A copy of ``file`` with other ``values`` and ``tensors`` (None: without it)."""
    reader, other = gguf.GGUFReader(file), file.with_name("changed.gguf")
    writer = gguf.GGUFWriter(other, "llada")
    stated = {name: field.contents() for name, field in reader.fields.items()}
    for name, value in (stated | values).items():
        if name.startswith("GGUF.") or value is None or name == "general.architecture":
            continue
        kind = reader.fields[name].types[0] if name not in values else {
            int: gguf.GGUFValueType.UINT64, float: gguf.GGUFValueType.FLOAT64,
            str: gguf.GGUFValueType.STRING, list: gguf.GGUFValueType.ARRAY,
            bool: gguf.GGUFValueType.BOOL,
        }[type(value)]  # fmt: skip
        writer.add_key_value(name, value, kind, *([gguf.GGUFValueType.UINT32] * (kind == 9)))
    for tensor in reader.tensors:
        if tensor.name not in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in tensors.items():
        if data is not None:
            writer.add_tensor(name, data)
    if "general.architecture" in values:
        del writer.kv_data[0]["general.architecture"]
        value = values["general.architecture"]
        writer.add_key_value("general.architecture", value, gguf.GGUFValueType.ARRAY,
                             gguf.GGUFValueType.STRING)  # fmt: skip
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file,
                 writer.write_tensors_to_file, writer.close):  # fmt: skip
        step()
    return other


FEW = np.zeros(96, np.float32)


@pytest.mark.parametrize(
    ("values", "tensors", "message"),
    [
        ({"llada.block_count": 2**60}, {}, "block_count is 1152921504606846976"),
        ({"llada.block_count": 10**6}, {}, "2 layers are there, 1000000 stated"),
        ({"llada.block_count": 3000}, {}, "2 layers are there, 3000 stated"),
        ({"llada.block_count": "two"}, {}, "block_count is 'two'"),
        ({"llada.attention.head_count": 0}, {}, "head_count is 0"),
        ({"llada.attention.head_count": 3}, {}, "3 heads"),
        ({"llada.attention.head_count_kv": 3}, {}, "4 heads, 3 of keys"),
        ({"llada.embedding_length": 128}, {}, "for a width of 128"),
        ({"llada.context_length": None}, {}, "lacks"),
        ({"general.architecture": ["llada"]}, {}, "holds a network of architecture"),
        ({"split.count": 2}, {}, "one of 2 parts: join them"),
        ({}, {"token_embd.weight": FEW}, "embeddings of shape"),
        ({}, {"output_norm.weight": FEW}, "output_norm.weight in changed.gguf has the shape"),
        ({}, {"blk.0": FEW}, "blk.0 in changed.gguf has no place"),
        ({}, {"blk.x.attn_q.weight": FEW}, "3 layers are there"),
        ({"llada.rope.scaling.type": "linear"}, {}, "scaling.type is 'linear'; GGUF files are"),
        ({"llada.attention.key_length": 32}, {}, "key_length is 32; GGUF files are"),
        ({"tokenizer.ggml.mask_token_id": "x"}, {}, "changed.gguf has mask_token_id='x'"),
        ({}, {"output.weight": np.zeros((96, 256))}, "F64, which the package gguf does not"),
        ({}, {"blk.1.attn_q.weight": None}, "lacks model.layers.1.self_attn.q_proj.weight"),
    ],
)
def test_damaged_files_are_refused_before_anything_is_built(
    tmp_path: Path, values: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    write(tmp_path / "good.gguf", "llada", {"": "Q8_0"})
    assert dllm.load(changed(tmp_path / "good.gguf", {}, {})).family.name == "llada"
    with pytest.raises(dllm.CheckpointError, match=message):
        dllm.load(changed(tmp_path / "good.gguf", values, tensors))


def test_a_file_says_whether_its_head_is_shifted(tmp_path: Path) -> None:
    write(tmp_path / "good.gguf", "llada", {"": "Q8_0"})
    file = changed(tmp_path / "good.gguf", {"diffusion.shift_logits": True}, {})
    assert dllm.load(file).facts.logit_shift == 1


def test_the_doctor_reckons_with_what_is_held(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(file, "llada", {"": "Q8_0", "attn_q": "Q4_0", "ffn_up": "F16"})
    needs, family = gguf_footprint(file)
    held = dllm.load(file).hf.state_dict().values()
    assert (needs.weights, family) == (sum(value.nbytes for value in held), "llada")
    found = {each.topic: each.text for each in examine(str(file), ("here", 1))}
    assert "rounded as in the file" in found["weights"] and "does not fit" in found
    assert "instead" not in found
    with pytest.raises(CheckpointError, match="there is no file"):
        list(examine(str(tmp_path / "absent.gguf"), ("here", 1)))
