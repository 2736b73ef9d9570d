"""Where the time of a cached step goes, and how fast this machine multiplies few rows.

    python benchmarks/cache_profile.py

A step between two refreshes at prompt 512 and 256 new tokens, on the LLaDA- and the Dream-shaped
model: shares of processor time spent in matrix products, in attention, in moving keys and values
(writing slots, gathering those that are read), and in the rest.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import dllm
from dllm.eval.cost import Rates, Shape

from caches import MODELS  # isort: skip
from report import RESULTS, write  # isort: skip

KINDS = {
    "aten::mm": "products", "aten::addmm": "products", "aten::bmm": "products",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::index_copy_": "moving", "aten::index": "moving", "aten::gather": "moving",
    "aten::index_put_": "moving", "aten::_index_put_impl_": "moving",
}  # fmt: skip
WARM = 3  # steps before those that are profiled: the refresh, and two that follow it


def shares(model: dllm.DiffusionModel, cache: str, prompt: int, steps: int) -> dict[str, float]:
    """Share of processor time by kind of operation, over ``steps`` steps between refreshes."""
    ids = torch.randint(1, 49000, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    events = dllm.stream(
        model, ids, sampler="llada", cache=cache, eos_policy="none", max_new_tokens=256,
        block_length=32, steps=64,
    )  # fmt: skip
    for _ in range(WARM):
        next(events)
    with profile(activities=[ProfilerActivity.CPU]) as result:
        for _ in range(steps):
            next(events)
    times = dict.fromkeys(("products", "attention", "moving", "rest"), 0.0)
    for event in result.key_averages():
        times[KINDS.get(event.key, "rest")] += event.self_cpu_time_total
    total = sum(times.values())
    return {kind: time / total for kind, time in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--caches", nargs="+", default=["none", "dual", "window_diffusion"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "cache_profile.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases: list[dict[str, Any]] = []
    rates: dict[str, Any] = {}
    for name, build in MODELS.items():
        model = build()
        measured = Rates.measure(Shape.of(model.hf.config), model.device, torch.float32)
        rates[name] = [
            {"rows": rows, "gflops": rate / 1e9}
            for rows, rate in zip(measured.rows, measured.rate, strict=True)
        ]
        print(name, ", ".join(f"{r['rows']}: {r['gflops']:.0f} Gflop/s" for r in rates[name]))
        for cache in options.caches:
            result = shares(model, cache, options.prompt, 2 if cache == "none" else 4)
            cases.append({"model": name, "cache": cache, "prompt": options.prompt, **result})
            print(name, f"{cache:16}", ", ".join(f"{k} {v:.1%}" for k, v in result.items()))
    write(options.output, {"threads": options.threads, "rates": rates, "cases": cases})


if __name__ == "__main__":
    main()
