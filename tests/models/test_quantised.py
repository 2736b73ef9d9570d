"""Quantised weights through transformers, where a CPU can run them and the package is there."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import dllm

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
PARTS = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_name(key: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight":
             "output_norm.weight", "lm_head.weight": "output.weight"}  # fmt: skip
    if key in outer:
        return outer[key]
    _, _, layer, rest = key.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{kind}"


def write_gguf(hf: Any, file: Path) -> None:
    """The network in the format of llama.cpp, its matrices in blocks of 8-bit numbers."""
    import gguf

    c = hf.config
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"w{i}" for i in range(c.vocab_size)])
    for key, weight in hf.state_dict().items():
        kind = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else gguf.GGMLQuantizationType.Q8_0
        numbers = gguf.quants.quantize(weight.float().numpy(), kind)
        writer.add_tensor(gguf_name(key), numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_diffusion_model(tmp_path: Path) -> None:
    """Read by transformers, handed over in memory: the numbers are those of the file."""
    pytest.importorskip("gguf")
    torch.manual_seed(0)
    original = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
    write_gguf(original, tmp_path / "model.gguf")
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
