"""Steps, statistics and whole generations on a GPU, against the floors of a roofline.

    python benchmarks/gpu.py --output benchmarks/results/gpu_h200.json
    python benchmarks/gpu.py --quick                 # fewer cases
    python benchmarks/gpu.py --tiny --device cpu     # does the script run?

Models have the shapes of LLaDA-8B and Dream-7B, bfloat16 and random weights: times depend on shapes
only.  A floor is the larger of arithmetic over peak and bytes over bandwidth, separately for
layers, attention and head; ``--tflops`` and ``--terabytes`` are the sustained peaks assumed (of an
H200 by default).  Measured are

- steps: median time of a step by the number of positions it computes, per cache and batch;
- statistics: the fused kernel, the tiled one and a float64 softmax over all logits; their memory;
- generations: tokens per second at a fixed schedule of 1, 2 and 4 tokens per step.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import dllm
from dllm.engine import Engine
from dllm.errors import DllmError
from dllm.kernels.statistics import token_statistics

from report import RESULTS, write  # isort: skip


@dataclass(frozen=True)
class Shape:
    """Sizes of a network; ``mask`` is its mask token."""

    family: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    mask: int

    def build(self, device: str, dtype: torch.dtype) -> dllm.DiffusionModel:
        sizes: dict[str, Any] = {
            "vocab_size": self.vocabulary, "hidden_size": self.width,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 4096, "tie_word_embeddings": False,
            "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
        }  # fmt: skip
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                network: Any = (
                    LlamaForCausalLM(LlamaConfig(**sizes))
                    if self.family == "llada"
                    else Qwen2ForCausalLM(Qwen2Config(**sizes))
                )
        finally:
            torch.set_default_dtype(before)
        return dllm.load(network, family=self.family, mask_token_id=self.mask, eos_token_id=0)

    def floor(self, queries: int, keys: int, scored: int, rows: int, peak: Peak) -> float:
        """Seconds that a step of ``queries`` positions cannot beat; ``keys`` per row are read."""
        head_dim = self.width // self.heads
        attention = 2 * self.width**2 + 2 * self.width * self.kv_heads * head_dim
        weights = self.layers * (attention + 3 * self.width * self.inner)
        head = self.width * self.vocabulary
        cached = 2 * 2 * self.layers * self.kv_heads * head_dim * keys * rows
        return (
            peak.seconds(2 * weights * queries, 2 * weights)
            + peak.seconds(4 * queries * keys * self.width * self.layers, cached)
            + peak.seconds(2 * head * scored, 2 * head)
        )


@dataclass(frozen=True)
class Peak:
    flops: float
    bandwidth: float

    def seconds(self, flops: float, moved: float) -> float:
        return max(flops / self.flops, moved / self.bandwidth)


SHAPES = {
    "LLaDA-8B": Shape("llada", 4096, 32, 32, 32, 12288, 126_464, 126_336),
    "Dream-7B": Shape("dream", 3584, 28, 28, 4, 18944, 152_064, 151_666),
}
TINY = {"tiny": Shape("llada", 64, 2, 4, 2, 96, 500, 499)}


@contextmanager
def timed() -> Iterator[list[tuple[int, int, int, float]]]:
    """(positions, targets, rows, seconds) of every forward with its statistics on the host."""
    found: list[tuple[int, int, int, float]] = []
    original = Engine._predict

    def predict(self: Engine, jobs: Any) -> Any:
        start = time.perf_counter()
        out = original(self, jobs)  # ends with a copy to the host: nothing is left running
        positions, targets = sum(j.size for j in jobs), sum(len(j.targets) for j in jobs)
        found.append((positions, targets, len(jobs), time.perf_counter() - start))
        return out

    with patch.object(Engine, "_predict", predict):
        yield found


def steps(model: dllm.DiffusionModel, shape: Shape, o: argparse.Namespace) -> list[dict[str, Any]]:
    """Median step times by cache, batch and number of positions."""
    found = []
    for cache in o.caches:
        for batch in o.batches:
            for graphs in (False, True) if batch == 1 and cache != "none" else (False,):
                case = {"cache": cache, "batch": batch, "cuda_graphs": graphs}
                try:
                    sizes = _sizes(model, o, case)
                except DllmError as error:  # out of memory, or a cache that is not there
                    found.append({**case, "error": str(error)})
                    continue
                for (queries, scored, rows), seconds in sizes.items():
                    floor = shape.floor(queries, o.prompt + o.new, scored, rows, o.peak)
                    found.append({
                        **case, "positions": queries, "targets": scored, "steps": len(seconds),
                        "ms": 1e3 * median(seconds), "floor_ms": 1e3 * floor,
                        "times_floor": median(seconds) / floor,
                    })  # fmt: skip
                    print(found[-1], flush=True)
    return found


def _sizes(
    model: dllm.DiffusionModel, o: argparse.Namespace, case: dict[str, Any]
) -> dict[tuple[int, int, int], list[float]]:
    for warm in (True, False):
        with timed() as forwards:
            generate(model, o, case["cache"], 2 if warm else 1, case["batch"], case["cuda_graphs"])
    sizes = defaultdict(list)
    for queries, scored, rows, seconds in forwards:
        bucket = scored if scored == o.block * rows else -(-scored // 8) * 8
        sizes[queries, bucket, rows].append(seconds)
    most = sorted(sizes.items(), key=lambda item: -len(item[1]))
    return {key: seconds[len(seconds) // 10 :] for key, seconds in most[:4]}


def generate(
    model: dllm.DiffusionModel, o: argparse.Namespace, cache: str, per_step: int, batch: int = 1,
    graphs: bool = False,
) -> list[dllm.Result]:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.hf.config.vocab_size - 1
    prompts = torch.randint(1, vocabulary - 200, (batch, o.prompt), generator=generator)
    return dllm.generate(
        model, prompts.tolist(), sampler="llada", steps=o.new // per_step, block_length=o.block,
        max_new_tokens=o.new, cache=cache, eos_policy="none", cuda_graphs=graphs,
    )  # fmt: skip


def statistics(shape: Shape, o: argparse.Namespace) -> list[dict[str, Any]]:
    """The head and its statistics, three ways."""
    weight = torch.randn(shape.vocabulary, shape.width, device=o.device, dtype=o.dtype)
    weight *= 2 * shape.width**-0.5
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "product": lambda h: h @ weight.T,
        "torch": lambda h: token_statistics(h, weight, backend="torch").numpy(),
        "float64_softmax": lambda h: _official(h @ weight.T),
    }
    if o.device != "cpu":
        ways["triton"] = lambda h: token_statistics(h, weight, backend="triton").numpy()
    found = []
    for rows in o.rows:
        hidden = torch.randn(rows, shape.width, device=o.device, dtype=o.dtype)
        floor = o.peak.seconds(2 * weight.numel() * rows, 2 * weight.numel())
        case: dict[str, Any] = {"rows": rows, "floor_ms": 1e3 * floor}
        for name, way in ways.items():
            case[name] = {"ms": 1e3 * _seconds(lambda w=way, h=hidden: w(h), o)}
            case[name]["extra_mib"] = _memory(lambda w=way, h=hidden: w(h), o)
        agree = token_statistics(hidden, weight).token == (hidden @ weight.T).float().argmax(-1)
        case["same_argmax"] = agree.float().mean().item()
        found.append(case)
        print(case, flush=True)
    return found


def _official(logits: torch.Tensor) -> torch.Tensor:
    token = logits.argmax(-1, keepdim=True)
    return torch.softmax(logits.to(torch.float64), -1).gather(-1, token)


def _wait(o: argparse.Namespace) -> None:
    if o.device != "cpu":
        torch.cuda.synchronize()


def _seconds(call: Callable[[], object], o: argparse.Namespace) -> float:
    spent = []
    for _ in range(o.repeats + 3):
        _wait(o)
        start = time.perf_counter()
        call()
        _wait(o)
        spent.append(time.perf_counter() - start)
    return median(spent[3:])


def _memory(call: Callable[[], object], o: argparse.Namespace) -> float | None:
    if o.device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def generations(model: dllm.DiffusionModel, o: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens per second, batch 1."""
    found = []
    for cache in o.caches:
        for per_step in (1, 2, 4):
            for graphs in (False, True) if cache != "none" else (False,):
                case = {"cache": cache, "tokens_per_step": per_step, "cuda_graphs": graphs}
                try:
                    (result,) = generate(model, o, cache, per_step, graphs=graphs)
                except DllmError as error:
                    found.append({**case, "error": str(error)})
                    continue
                found.append({**case, "tokens_per_second": o.new / result.seconds})
                print(found[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="batch 1, fewer rows and repeats")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; figures mean nothing")
    parser.add_argument("--caches", nargs="+", default=["none", "dual", "window"])
    parser.add_argument("--tflops", type=float, default=800.0)
    parser.add_argument("--terabytes", type=float, default=4.8)
    o = parser.parse_args()
    o.peak = Peak(o.tflops * 1e12, o.terabytes * 1e12)
    o.dtype = torch.float32 if o.tiny else torch.bfloat16
    o.prompt, o.new, o.block = (16, 16, 8) if o.tiny else (512, 256, 32)
    small = o.quick or o.tiny
    o.batches, o.rows = ((1,), (32,)) if small else ((1, 8, 32), (32, 256, 768))
    o.repeats = 3 if small else 20
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if o.device != "cpu" else "cpu",
        "peak": {"tflops": o.tflops, "terabytes_per_second": o.terabytes},
        "prompt": o.prompt, "new": o.new, "block": o.block,
    }  # fmt: skip
    for name, shape in (TINY if o.tiny else SHAPES).items():
        print(name, flush=True)
        heads = statistics(shape, o)
        model = shape.build(o.device, o.dtype)
        found[name] = {
            "statistics": heads,
            "steps": steps(model, shape, o),
            "generations": generations(model, o),
        }
        del model
        if o.device != "cpu":
            torch.cuda.empty_cache()
        write(o.output, found)  # also when a later case fails


if __name__ == "__main__":
    main()
