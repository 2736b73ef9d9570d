"""Wall time and computed positions of the caches, as ratios to no cache, side by side in one run.

    python benchmarks/caches.py --prompt 256 --new 256 --block 32

A LLaDA-shaped model of 135M parameters with random weights: what is measured is cost, not quality.
Beside the measured ratio stands the one that the positions fed to the model predict.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import dllm

from report import RESULTS, write  # isort: skip
from shapes import llada_135m  # isort: skip

CACHES = ("none", "prefix", "dual")


def run(model: dllm.DiffusionModel, prompt: list[int], cache: str, **how: Any) -> dict[str, Any]:
    """One generation; the first step's refresh is part of it, as for any user."""
    start = time.perf_counter()
    out = dllm.generate(model, prompt, sampler="llada", cache=cache, eos_policy="none", **how)
    seconds = time.perf_counter() - start
    return {"cache": cache, "seconds": seconds, "nfe": out.nfe, "computed": out.computed,
            "tokens": len(out.sequences) - len(prompt)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--per-step", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "caches.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = llada_135m()
    prompt = torch.randint(1, 49000, (options.prompt,), generator=torch.Generator()).tolist()
    run(model, prompt[:8], "dual", max_new_tokens=8)  # warm-up
    cases = []
    for per_step in options.per_step:
        how = {"max_new_tokens": options.new, "block_length": options.block,
               "steps": options.new // per_step}  # fmt: skip
        found = [run(model, prompt, cache, **how) for cache in CACHES]
        for case in found:
            case |= {
                "tokens_per_step": per_step,
                "speedup": found[0]["seconds"] / case["seconds"],
                "fewer_positions": found[0]["computed"] / case["computed"],
            }
            print(f"{per_step} per step, {case['cache']:6}: {case['seconds']:7.1f} s, "
                  f"{case['computed']:7d} positions, {case['speedup']:.2f}x faster "
                  f"({case['fewer_positions']:.2f}x fewer positions)", flush=True)  # fmt: skip
        cases += found
    setting = {"prompt": options.prompt, "new": options.new, "block": options.block}
    write(options.output, {"threads": options.threads, **setting, "cases": cases})


if __name__ == "__main__":
    main()
