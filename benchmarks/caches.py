"""Wall time, computed positions and bytes of every cache, against no cache and a FLOP count.

    python benchmarks/caches.py                  # every shape; hours on a small machine
    python benchmarks/caches.py --quick          # one shape, few tokens
    python benchmarks/caches.py --prompts 512 --new 256 --models llada --per-step 1

Models with random weights: what is measured is cost, not quality.  ``speedup`` is the time without
a cache over that with it, side by side in one run; ``flop_ratio`` the same in floating-point
operations (projections, attention, head; what layer-wise caches spend on choosing is left out);
``measured_to_flops`` is their quotient, 1 when time follows operations; a step of few positions is
bound by reading the weights instead and stays below.  ``cpu_speedup`` is the ratio of processor
time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dllm

from report import RESULTS, write  # isort: skip
from shapes import dream_135m, llada_135m  # isort: skip

MODELS: dict[str, Callable[[], dllm.DiffusionModel]] = {"llada": llada_135m, "dream": dream_135m}
CACHES = (
    "none", "prefix", "dual", "dkv", "dkv_prefill", "dkv_pd", "dkv_greedy", "window_diffusion",
    "dllm_cache", "dsb", "dcd", "vicinity", "sparse", "d2", "elastic",
)  # fmt: skip
HEADLINE = ("llada", 512, 256)


def flops(model: dllm.DiffusionModel, out: dllm.Result) -> float:
    """Operations of a run: two per multiply-add, from the positions computed and read."""
    c: Any = model.hf.config
    heads = c.hidden_size // c.num_attention_heads
    kv = heads * c.num_key_value_heads
    per_layer = (
        2 * c.hidden_size**2 + 2 * c.hidden_size * kv + 3 * c.hidden_size * c.intermediate_size
    )
    assert out.trace is not None
    fed = sum(step.computed for step in out.trace.steps)
    total = 0.0
    for step in out.trace.steps:
        q = step.computed * out.computed / fed  # layer-wise caches compute fewer than they feed
        read = len(out.sequences) if step.read is None else sum(b - a for a, b in step.read)
        rows = len(step.commits) + len(step.drafts)
        total += c.num_hidden_layers * (2 * q * per_layer + 4 * q * read * c.hidden_size)
        total += 2 * rows * c.hidden_size * c.vocab_size
    return total


def run(model: dllm.DiffusionModel, prompt: list[int], cache: str, **how: Any) -> dict[str, Any]:
    """One generation; the first step's refresh is part of it, as for any user."""
    sampler = "llada(remasking=random)" if cache == "dkv_greedy" else "llada"
    start, began = time.perf_counter(), time.process_time()
    out = dllm.generate(
        model, prompt, sampler=sampler, cache=cache, eos_policy="none", trace=True, **how
    )
    seconds, cpu = time.perf_counter() - start, time.process_time() - began
    return {"cache": cache, "seconds": seconds, "cpu_seconds": cpu, "nfe": out.nfe,
            "computed": out.computed, "cache_bytes": out.cache_bytes, "flops": flops(model, out),
            "tokens": len(out.sequences) - len(prompt)}  # fmt: skip


def shape(model: dllm.DiffusionModel, prompt: int, new: int, options: Any) -> list[dict[str, Any]]:
    """All caches on one shape, no cache first."""
    ids = torch.randint(1, 49000, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    found = []
    for per_step in options.per_step:
        how = {"max_new_tokens": new, "block_length": options.block, "steps": new // per_step}
        cases = [run(model, ids, cache, **how) for cache in ["none", *options.caches]]
        for case in cases:
            speedup, ratio = (cases[0][key] / case[key] for key in ("seconds", "flops"))
            case |= {
                "tokens_per_step": per_step,
                "speedup": speedup,
                "cpu_speedup": cases[0]["cpu_seconds"] / case["cpu_seconds"],
                "fewer_positions": cases[0]["computed"] / case["computed"],
                "flop_ratio": ratio,
                "measured_to_flops": speedup / ratio,
                "slower_than_none": speedup < 1,
            }
            print(f"P={prompt} G={new} {per_step} per step {case['cache']:16} "
                  f"{case['seconds']:7.1f} s {case['computed']:8d} positions "
                  f"{speedup:5.2f}x faster ({case['cpu_speedup']:5.2f}x in processor time), "
                  f"{ratio:5.2f}x fewer FLOP", flush=True)  # fmt: skip
        found += cases
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--new", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--per-step", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--caches", nargs="+", default=[c for c in CACHES if c != "none"])
    parser.add_argument("--quick", action="store_true", help="one shape: P=64, G=32, 4 per step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "caches.json")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.new, options.per_step = [64], [32], [4]
        options.models = options.models[:1]
    torch.set_num_threads(options.threads)
    shapes = []
    for name in options.models:
        model = MODELS[name]()
        run(model, [1] * 8, "dual", max_new_tokens=8)  # warm-up
        for prompt in options.prompts:
            for new in options.new:
                cases = shape(model, prompt, new, options)
                shapes.append({"model": name, "prompt": prompt, "new": new, "cases": cases})
    # The README quotes one shape: the headline one, or the first that was run.
    chosen = next((s for s in shapes if (s["model"], s["prompt"], s["new"]) == HEADLINE), shapes[0])
    setting = {"threads": options.threads, "block": options.block}
    write(options.output, {**setting, **chosen, "shapes": shapes})


if __name__ == "__main__":
    main()
