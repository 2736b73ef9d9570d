"""Wall time, computed positions and bytes of every cache, against no cache.

    python benchmarks/caches.py                     # every shape; goes on where it stopped
    python benchmarks/caches.py --quick             # one shape, few tokens
    python benchmarks/caches.py --prompts 512 --new 256 --per-step 1 4

Models with random weights: what is measured is cost, not quality.  A shape is a model, a prompt, an
answer and the tokens per step; its caches run one after the other, in rounds (more of them where
they are short), and medians are compared within the shape.  Finished shapes are kept in the output
file and not run again.  Seconds are wall clock, with one thread processor time, which other
programs disturb less.  ``speedup`` is the time without a cache over the time with it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import dllm

from harness import RESULTS, dream_135m, kernels, llada_135m, write  # isort: skip

MODELS: dict[str, Callable[[str], dllm.DiffusionModel]] = {"llada": llada_135m, "dream": dream_135m}
CACHES = (
    "none", "prefix", "dual", "dkv", "dkv_prefill", "dkv_pd", "dkv_greedy", "window_diffusion",
    "dllm_cache", "dsb", "dcd", "vicinity", "elastic",
)  # fmt: skip
HEADLINE = ("llada", 512, 256)
LONG, ROUNDS = 20.0, 3  # seconds without a cache beyond which one round has to do


def run(
    model: dllm.DiffusionModel, prompt: list[int], cache: str, **how: Any
) -> tuple[dllm.Result, float]:
    """One generation and its seconds; the first step's refresh is part of it, as for any user."""
    sampler = "llada(remasking=random)" if cache == "dkv_greedy" else "llada"
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    out = dllm.generate(model, prompt, sampler=sampler, cache=cache, eos_policy="none", **how)
    assert isinstance(out, dllm.Result)
    return out, clock() - start


def measure(
    model: dllm.DiffusionModel, prompt: int, new: int, per_step: int, caches: list[str], block: int
) -> list[dict[str, Any]]:  # fmt: skip
    """All caches on one shape, no cache first."""
    ids = torch.randint(1, 49000, (prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    how = {"max_new_tokens": new, "block_length": block, "steps": new // per_step}
    names = ["none", *(c for c in caches if c != "none")]
    times: dict[str, list[float]] = {name: [] for name in names}
    cases: dict[str, dict[str, Any]] = {}
    while len(times["none"]) < (1 if times["none"] and times["none"][0] > LONG else ROUNDS):
        for name in names:
            out, seconds = run(model, ids, name, **how)
            times[name].append(seconds)
            cases[name] = {
                "cache": name, "tokens_per_step": per_step, "nfe": out.nfe,
                "computed": out.computed, "cache_bytes": out.cache_bytes,
            }  # fmt: skip
    for name, case in cases.items():
        case["seconds"], case["rounds"] = median(times[name]), len(times[name])
        base = cases["none"]
        case["speedup"] = base["seconds"] / case["seconds"]
        case["fewer_positions"] = base["computed"] / case["computed"]
        case["slower_than_none"] = case["speedup"] < 1
        print(f"P={prompt} G={new} {per_step} per step {name:16} {case['seconds']:7.1f} s "
              f"{case['computed']:8d} positions {case['speedup']:6.2f}x faster",
              flush=True)  # fmt: skip
    return list(cases.values())


def settings(options: Any) -> dict[str, Any]:
    names = ("dtype", "threads", "block", "caches")
    return {name: getattr(options, name) for name in names} | {"kernels": kernels()}


def finished(options: Any) -> list[dict[str, Any]]:
    """Shapes that the output file holds, measured under the same settings."""
    if not options.output.exists() or options.fresh:
        return []
    held = json.loads(options.output.read_text())
    if any(held.get(key) != value for key, value in settings(options).items()):
        raise SystemExit(f"{options.output} holds other settings: pass --fresh or another --output")
    result: list[dict[str, Any]] = held["shapes"]
    return result


def save(options: Any, shapes: list[dict[str, Any]]) -> None:
    """Everything measured; on top the shape that the README quotes, or the first."""
    mine = [s for s in shapes if (s["model"], s["prompt"], s["new"]) == HEADLINE] or shapes[:1]
    cases = [case for shape in mine for case in shape["cases"]]
    write(options.output, {**settings(options), **mine[0], "cases": cases, "shapes": shapes})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 2048])
    parser.add_argument("--new", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--per-step", type=int, nargs="+", default=[4])
    parser.add_argument("--caches", nargs="+", default=[c for c in CACHES if c != "none"])
    parser.add_argument("--quick", action="store_true", help="one shape: P=64, G=32, 4 per step")
    parser.add_argument("--fresh", action="store_true", help="forget what the output file holds")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "caches.json")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.new = [64], [32]
        options.models = options.models[:1]
    torch.set_num_threads(options.threads)
    shapes = finished(options)
    known = {(s["model"], s["prompt"], s["new"], s["tokens_per_step"]) for s in shapes}
    for name in options.models:
        wanted = [
            (name, prompt, new, per_step)
            for prompt in options.prompts for new in options.new for per_step in options.per_step
            if (name, prompt, new, per_step) not in known
        ]  # fmt: skip
        if not wanted:
            continue
        model = MODELS[name](options.dtype)
        run(model, [1] * 8, "dual", max_new_tokens=8)  # warm-up
        for _, prompt, new, per_step in wanted:
            cases = measure(model, prompt, new, per_step, options.caches, options.block)
            shapes.append({"model": name, "prompt": prompt, "new": new,
                           "tokens_per_step": per_step, "cases": cases})  # fmt: skip
            save(options, shapes)


if __name__ == "__main__":
    main()
