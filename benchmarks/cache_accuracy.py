"""Accuracy of the bundled model with every cache, with 95 % confidence intervals.

    python benchmarks/cache_accuracy.py                  # goes on where it stopped
    python benchmarks/cache_accuracy.py --again dcd d2   # of these, measured anew
    python benchmarks/cache_accuracy.py --quick

Answers of 32 tokens in blocks of 8, so that a cache of blocks has several to keep.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch

import dllm
from dllm.eval.metrics import wilson
from dllm.eval.tasks import TASKS
from dllm.train.recipes.nano import accuracy

from caches import CACHES  # isort: skip
from report import RESULTS, write  # isort: skip

WAYS = {"one token per step": "llada", "threshold 0.9": "threshold(0.9)"}


def finished(options: Any, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Cases that the output file holds, measured under the same settings."""
    if not options.output.exists() or options.fresh:
        return []
    held = json.loads(options.output.read_text())
    if any(held.get(key) != value for key, value in setting.items()):
        raise SystemExit(f"{options.output} holds other settings: pass --fresh or another --output")
    return [case for case in held["cases"] if case["cache"] not in options.again]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=16, help="per task")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--caches", nargs="+", default=list(CACHES))
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--again", nargs="+", default=(), help="caches to measure anew")
    parser.add_argument("--fresh", action="store_true", help="forget what the output file holds")
    parser.add_argument("--quick", action="store_true", help="4 examples of 2 tasks")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "cache_accuracy.json")
    options = parser.parse_args()
    if options.quick:
        options.examples, options.tasks = 4, options.tasks[:2]
    torch.set_num_threads(options.threads)
    how = {"max_new_tokens": options.new, "block_length": options.block}
    setting = {"model": "nano", "split": "test", "examples": options.examples,
               "tasks": options.tasks, **how}  # fmt: skip
    model, cases = dllm.load("nano"), finished(options, setting)
    known = {(case["cache"], case["way"]) for case in cases}
    for cache, (way, sampler) in product(options.caches, WAYS.items()):
        if cache == "dkv_greedy":  # needs to know what is committed before the forward
            if way != "one token per step":
                continue
            way, sampler = "random order", "llada(remasking=random)"
        if (cache, way) in known:
            continue
        result = accuracy(
            model, options.examples, options.tasks, sampler=sampler, cache=cache, **how
        )
        n = options.examples * len(options.tasks)
        share = sum(result.values()) / len(result)
        low, high = wilson(round(share * n), n)
        cases.append({"cache": cache, "way": way, "accuracy": share, "low": low, "high": high,
                      "prompts": n, "by_task": result})  # fmt: skip
        print(f"{cache:16} {way:20} {share:.3f} [{low:.3f}, {high:.3f}]", flush=True)
        write(options.output, {**setting, "cases": cases})


if __name__ == "__main__":
    main()
