"""Memory and time per step of the caches as the prompt grows; which of them stay flat.

    python benchmarks/cache_memory.py            # up to 4,096 prompt tokens
    python benchmarks/cache_memory.py --caches dcd d2    # of these, measured anew
    python benchmarks/cache_memory.py --quick

One block of 32 positions, 8 steps, on the LLaDA-shaped model.  Time per step is that of the steps
between refreshes, the median over them; a refresh costs what a step without a cache costs.
Writes JSON and an SVG beside it (needs the `eval` extra).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import dllm
from dllm.eval.plot import check_plots, new_figure

from caches import CACHES  # isort: skip
from harness import RESULTS, kernels, llada_135m, write  # isort: skip


def measure(model: dllm.DiffusionModel, cache: str, prompt: int) -> dict[str, Any]:
    """Seconds of refreshes and of the steps in between, and bytes held."""
    ids = torch.randint(1, 49000, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = "llada(remasking=random)" if cache == "dkv_greedy" else "llada"
    times, result = [], None
    last = time.perf_counter()
    for event in dllm.stream(
        model, ids, sampler=sampler, cache=cache, eos_policy="none", max_new_tokens=32,
        block_length=32, steps=8,
    ):  # fmt: skip
        now = time.perf_counter()
        times.append(now - last)
        last, result = now, event.result or result
    assert result is not None
    # The first step refreshes; the fastest half of the others are those that do not.
    between = sorted(times[1:])[: max(1, len(times) // 2)]
    return {"cache": cache, "prompt": prompt, "first": times[0],
            "between": statistics.median(between), "cache_bytes": result.cache_bytes}  # fmt: skip


def plot(cases: list[dict[str, Any]], file: Path) -> None:
    """Time per step and bytes over prompt length, one line per cache."""
    with new_figure(11, 4.5, [file]) as figure:
        axes = figure.subplots(1, 2)
        for cache in dict.fromkeys(case["cache"] for case in cases):
            mine = [case for case in cases if case["cache"] == cache]
            prompts = [case["prompt"] for case in mine]
            axes[0].plot(prompts, [1e3 * case["between"] for case in mine], label=cache)
            axes[1].plot(prompts, [case["cache_bytes"] / 2**20 for case in mine], label=cache)
        for axis, name in zip(axes, ("ms per step between refreshes", "MiB held"), strict=True):
            axis.set(xlabel="prompt tokens", ylabel=name, ylim=(0, None))
        axes[0].legend(fontsize=7, ncols=2)
        figure.tight_layout()
    print(f"wrote {file}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    parser.add_argument("--caches", nargs="+", default=list(CACHES))
    parser.add_argument("--quick", action="store_true", help="prompts of 64 and 256 tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "cache_memory.json")
    options = parser.parse_args()
    check_plots()
    torch.set_num_threads(options.threads)
    prompts = [64, 256] if options.quick else options.prompts
    model = llada_135m(options.dtype)
    measure(model, "dual", 16)  # warm-up
    cases = []
    if options.output.exists() and set(options.caches) < set(CACHES):
        held = json.loads(options.output.read_text())["cases"]
        cases = [case for case in held if case["cache"] not in options.caches]
    for cache in options.caches:
        mine = [measure(model, cache, prompt) for prompt in prompts]
        growth = mine[-1]["between"] / mine[0]["between"]
        for case in mine:
            case["growth"] = growth
        print(f"{cache:16} {1e3 * mine[0]['between']:7.0f} -> {1e3 * mine[-1]['between']:7.0f} ms, "
              f"{mine[-1]['cache_bytes'] / 2**20:6.0f} MiB", flush=True)  # fmt: skip
        cases += mine
    write(
        options.output,
        {name: getattr(options, name) for name in ("dtype", "threads")}
        | {"kernels": kernels(), "cases": cases},
    )
    plot(cases, options.output.with_suffix(".svg"))


if __name__ == "__main__":
    main()
