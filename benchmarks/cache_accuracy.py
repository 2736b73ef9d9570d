"""Accuracy of the bundled model with every cache, with 95 % confidence intervals.

python benchmarks/cache_accuracy.py --examples 500
python benchmarks/cache_accuracy.py --quick
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

import dllm
from dllm.eval.tasks import TASKS
from dllm.train.accuracy import accuracy

from caches import CACHES  # isort: skip
from report import RESULTS, write  # isort: skip

WAYS = {"one token per step": "llada", "threshold 0.9": "threshold(0.9)"}


def interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's score interval at 95 %."""
    z = 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return middle - half, middle + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=200, help="per task")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--caches", nargs="+", default=list(CACHES))
    parser.add_argument("--quick", action="store_true", help="4 examples of 2 tasks")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS / "cache_accuracy.json")
    options = parser.parse_args()
    if options.quick:
        options.examples, options.tasks = 4, options.tasks[:2]
    torch.set_num_threads(options.threads)
    model, cases = dllm.load("nano"), []
    for cache in options.caches:
        for way, sampler in WAYS.items():
            if cache == "dkv_greedy":  # needs to know what is committed before the forward
                if way != "one token per step":
                    continue
                way, sampler = "random order", "llada(remasking=random)"
            found: dict[str, Any] = accuracy(
                model, options.examples, options.tasks, sampler=sampler, cache=cache
            )
            n = options.examples * len(options.tasks)
            share = sum(found.values()) / len(found)
            low, high = interval(share, n)
            cases.append({"cache": cache, "way": way, "accuracy": share, "low": low, "high": high,
                          "examples": n, "tasks": found})  # fmt: skip
            print(f"{cache:16} {way:20} {share:.3f} [{low:.3f}, {high:.3f}]", flush=True)
    write(options.output, {"model": "nano", "split": "test", "cases": cases})


if __name__ == "__main__":
    main()
