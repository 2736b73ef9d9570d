"""Steps, statistics and whole generations on a GPU, against the floors of a roofline.

    python benchmarks/gpu.py --models LLaDA-8B       # about five minutes
    python benchmarks/gpu.py --models Dream-7B --parts steps generations
    python benchmarks/gpu.py --dry                   # every path on a CPU; figures mean nothing

Models have the shapes of LLaDA-8B and Dream-7B, bfloat16 and random weights: times depend on shapes
only.  Floors are those of `roofline`; ``--tflops`` and ``--terabytes`` are the sustained peaks
assumed (of an H200 by default).  The parts:

- statistics: the head with its statistics (fused, tiled, sampling, top-p), the bare product, and a
  float64 softmax over all logits; time, memory, agreement;
- rotation: rotating and storing the keys of all layers, fused and not;
- steps: median time of a step by the number of positions it computes, per cache and batch;
- generations: tokens per second at a fixed schedule of 1, 2 and 4 tokens per step.

Results are added to ``--output`` after every part, so that parts may run one command at a time;
no case begins later than ``--budget`` seconds after the start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

if "--dry" in sys.argv:  # Triton has to know before its first import
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import dllm
from dllm.core.errors import OutOfMemoryError
from dllm.engine.forward import Forward
from dllm.engine.graphs import uncaptured
from dllm.kernels.noise import pack_keys
from dllm.kernels.rotation import rotate_scatter
from dllm.kernels.statistics import token_statistics

from report import RESULTS, write  # isort: skip
from roofline import DRY, SHAPES, Peak, Shape  # isort: skip

PARTS = ("statistics", "rotation", "steps", "generations")
Cases = Iterator[dict[str, Any]]


def build(shape: Shape, o: argparse.Namespace) -> dllm.DiffusionModel:
    """A network of that shape with random weights."""
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.width,
        "intermediate_size": shape.inner, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(o.dtype)
    try:
        with torch.device(o.device):
            network: Any = (
                LlamaForCausalLM(LlamaConfig(**sizes))
                if shape.family == "llada"
                else Qwen2ForCausalLM(Qwen2Config(**sizes))
            )
    finally:
        torch.set_default_dtype(before)
    return dllm.load(
        network, family=shape.family, mask_token_id=shape.mask, eos_token_id=0,
        attn_implementation=o.attention,
    )  # fmt: skip


def statistics(shape: Shape, o: argparse.Namespace) -> Cases:
    """The head and its statistics, in several ways."""
    weight = torch.randn(shape.vocabulary, shape.width, device=o.device, dtype=o.dtype)
    weight *= 2 * shape.width**-0.5
    for rows in o.rows:
        hidden = torch.randn(rows, shape.width, device=o.device, dtype=o.dtype)
        keys = pack_keys([(1, 0, row, 0) for row in range(rows)], o.device)
        sampled = {"temperature": 0.7, "noise_keys": keys}

        def ours(backend: str, hidden: torch.Tensor = hidden, **options: Any) -> object:
            return token_statistics(hidden, weight, backend=backend, **options).numpy()

        ways: dict[str, Callable[[], object]] = {
            "product": partial(torch.matmul, hidden, weight.T),
            "float64_softmax": partial(_official, hidden, weight),
            "torch": partial(ours, "torch"),
            "triton": partial(ours, "triton"),
            "triton_sampled": partial(ours, "triton", **sampled),
            "triton_top_p": partial(ours, "triton", top_p=0.95, **sampled),
        }
        case: dict[str, Any] = {"rows": rows, "floor_ms": 1e3 * shape.head_floor(rows, o.peak)}
        for name, way in ways.items():
            case[name] = {"ms": 1e3 * _seconds(way, o), "extra_mib": _memory(way, o)}
        official, fused = case["float64_softmax"], case["triton"]
        case["times_faster_than_float64"] = official["ms"] / fused["ms"]
        if fused["extra_mib"]:
            case["times_less_memory_than_float64"] = official["extra_mib"] / fused["extra_mib"]
        argmax = (hidden @ weight.T).float().argmax(-1)
        same = token_statistics(hidden, weight, backend="triton").token == argmax
        case["same_argmax"] = same.float().mean().item()
        yield case


def _official(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    logits = hidden @ weight.T
    token = logits.argmax(-1, keepdim=True)
    return torch.softmax(logits.to(torch.float64), -1).gather(-1, token)


def rotation(shape: Shape, o: argparse.Namespace) -> Cases:
    """Rotating queries and keys and storing keys and values, once per layer."""
    width, slots = shape.width // shape.heads, o.prompt + o.new
    for count in (o.block, slots):

        def states(heads: int, length: int) -> torch.Tensor:
            return torch.randn(length, heads, width, device=o.device, dtype=o.dtype).transpose(0, 1)

        q, k, v = (states(n, count) for n in (shape.heads, shape.kv_heads, shape.kv_heads))
        keys, values = (states(shape.kv_heads, slots).contiguous() for _ in range(2))
        angle = torch.rand(count, width // 2, device=o.device).repeat(1, 2)
        at = torch.arange(count, device=o.device)

        def layers(backend: str, given: tuple[torch.Tensor, ...]) -> None:
            for _ in range(shape.layers):
                rotate_scatter(*given, backend=backend)

        given = (q, k, v, angle.cos(), angle.sin(), at, keys, values)
        ways = {name: partial(layers, name, given) for name in ("torch", "triton")}
        yield {"positions": count} | {f"{n}_ms": 1e3 * _seconds(w, o) for n, w in ways.items()}


class Enough(Exception):
    """A generation has shown as many steps as are wanted."""


@contextmanager
def timed(o: argparse.Namespace) -> Iterator[list[tuple[int, int, int, float, float]]]:
    """(positions, targets, rows, keys per row, seconds) of every forward with its statistics on
    the host, until there are enough."""
    result: list[tuple[int, int, int, float, float]] = []
    original, begun = Forward.predict, time.perf_counter()

    def predict(self: Forward, jobs: Any) -> Any:
        if len(result) >= o.most or (
            len(result) >= o.least and time.perf_counter() - begun > o.span
        ):
            raise Enough
        start = time.perf_counter()
        out = original(self, jobs)  # ends with a copy to the host: nothing is left running
        seconds = time.perf_counter() - start
        read = [j.canvas.length if j.plan.read is None else len(j.plan.read) for j in jobs]
        positions, targets = sum(j.size for j in jobs), sum(len(j.targets) for j in jobs)
        result.append((positions, targets, len(jobs), mean(read), seconds))
        return out

    with patch.object(Forward, "predict", predict):
        yield result


def steps(model: dllm.DiffusionModel, shape: Shape, o: argparse.Namespace) -> Cases:
    """Median step times by cache, batch and number of positions."""
    for batch in o.batches:
        for cache in o.caches:
            for graphs in (False, True) if batch == 1 and cache != "none" else (False,):
                case = {"cache": cache, "batch": batch, "cuda_graphs": graphs}
                try:
                    sizes = _sizes(model, o, case)
                except OutOfMemoryError as error:
                    yield {**case, "error": str(error)}
                    continue
                for (queries, rows), forwards in sizes.items():
                    scored, keys = (mean(f[i] for f in forwards) for i in (0, 1))
                    floor = shape.floor(queries, keys, round(scored), rows, o.peak)
                    spent = median(f[2] for f in forwards)
                    yield {
                        **case, "positions": queries, "targets": scored, "keys": keys,
                        "steps": len(forwards), "ms": 1e3 * spent, "floor_ms": 1e3 * floor,
                        "times_floor": spent / floor,
                    }  # fmt: skip


def _sizes(
    model: dllm.DiffusionModel, o: argparse.Namespace, case: dict[str, Any]
) -> dict[tuple[int, int], list[tuple[int, float, float]]]:
    """(targets, keys, seconds) of forwards by (positions, rows), the most frequent ones."""
    for _ in range(2):  # the first compiles
        with timed(o) as forwards, suppress(Enough):
            generate(model, o, case["cache"], 1, case["batch"], case["cuda_graphs"])
    sizes = defaultdict(list)
    for queries, scored, rows, keys, seconds in forwards:
        sizes[queries, rows].append((scored, keys, seconds))
    return dict(sorted(sizes.items(), key=lambda item: -len(item[1]))[:4])


def generate(
    model: dllm.DiffusionModel, o: argparse.Namespace, cache: str, per_step: int, batch: int = 1,
    graphs: bool = False,
) -> list[dllm.Result]:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.hf.config.vocab_size - 1
    prompts = torch.randint(1, vocabulary - 200, (batch, o.prompt), generator=generator)
    with uncaptured() if o.dry else nullcontext():  # padded steps without a GPU
        return dllm.generate(
            model, prompts.tolist(), sampler="llada", steps=o.new // per_step,
            block_length=o.block, max_new_tokens=o.new, cache=cache, eos_policy="none",
            cuda_graphs=graphs,
        )  # fmt: skip


def generations(model: dllm.DiffusionModel, shape: Shape, o: argparse.Namespace) -> Cases:
    """Tokens per second, batch 1; the second of two runs."""
    for cache in o.caches:
        for per_step in (1, 2, 4):
            for graphs in (False, True) if cache != "none" else (False,):
                for _ in range(2):
                    (result,) = generate(model, o, cache, per_step, graphs=graphs)
                yield {
                    "cache": cache, "tokens_per_step": per_step, "cuda_graphs": graphs,
                    "nfe": result.nfe, "tokens_per_second": o.new / result.seconds,
                }  # fmt: skip


def _wait(o: argparse.Namespace) -> None:
    if o.device != "cpu":
        torch.cuda.synchronize()


def _seconds(call: Callable[[], object], o: argparse.Namespace) -> float:
    spent = []
    for _ in range(o.warm + o.repeats):
        _wait(o)
        start = time.perf_counter()
        call()
        _wait(o)
        spent.append(time.perf_counter() - start)
    return median(spent[o.warm :])


def _memory(call: Callable[[], object], o: argparse.Namespace) -> float | None:
    if o.device == "cpu":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def collect(cases: Cases, started: float, o: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases, or those that begin within the budget."""
    result = []
    for case in cases:
        result.append(case)
        print(json.dumps(case), flush=True)
        if time.perf_counter() - started > o.budget:
            result.append({"error": f"the rest was left out: {o.budget:.0f} s were over"})
            break
    return result


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, help="default: results/gpu_<name of the device>.json"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--caches", nargs="+", default=["none", "dual", "window_diffusion"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of the models")
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU, no GPU needed")
    parser.add_argument("--tflops", type=float, default=800.0)
    parser.add_argument("--terabytes", type=float, default=4.8)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds")
    o = parser.parse_args()
    o.peak = Peak(o.tflops * 1e12, o.terabytes * 1e12)
    o.device = "cpu" if o.dry else o.device
    o.dtype = torch.float32 if o.dry else torch.bfloat16
    o.prompt, o.new, o.block = (16, 16, 8) if o.dry else (512, 256, 32)
    o.rows, o.warm, o.repeats = ((8,), 0, 1) if o.dry else ((32, 256, 768), 3, 20)
    o.least, o.most, o.span = (6, 72, 3.0)  # forwards, and seconds, per case of `steps`
    if o.dry:
        o.batches = [1, 2]
    elif not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry runs everything on the CPU at tiny sizes")
    if o.output is None:
        name = "dry" if o.dry else torch.cuda.get_device_name().replace(" ", "_")
        o.output = RESULTS / f"gpu_{name}.json"
    return o


def main() -> None:
    o, started = options(), time.perf_counter()
    shapes = DRY if o.dry else {name: SHAPES[name] for name in o.models}
    result = json.loads(o.output.read_text()) if o.output.exists() else {}
    result["peak"] = {"tflops": o.tflops, "terabytes_per_second": o.terabytes}
    result |= {"prompt": o.prompt, "new": o.new, "block": o.block}
    for name, shape in shapes.items():
        model: Any = None
        for part in o.parts:
            print(name, part, flush=True)
            if part in ("steps", "generations"):
                model = model or build(shape, o)
                cases = (steps if part == "steps" else generations)(model, shape, o)
            else:
                cases = (statistics if part == "statistics" else rotation)(shape, o)
            label = part if o.attention == "sdpa" else f"{part} ({o.attention})"
            with torch.inference_mode():
                result.setdefault(name, {})[label] = collect(cases, started, o)
            write(o.output, result)
        del model
        if o.device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
