"""Accuracy of the bundled models on held-out prompts; the numbers of their model cards.

    python benchmarks/nano.py --examples 500

For ``nano``: one token per step, threshold 0.9, and the whole block in one step.  For ``nano-ar``:
greedy continuation.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import dllm
from dllm.eval.tasks import TASKS
from dllm.train.recipes.nano import accuracy

from report import RESULTS, write  # isort: skip

WAYS: dict[str, dict[str, Any]] = {
    "one token per step": {"sampler": "llada"},
    "threshold 0.9": {"sampler": "threshold(0.9)"},
    "one step per block": {"sampler": "threshold(0)"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=500)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--models", nargs="+", default=["nano", "nano-ar"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "nano.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.models:
        model = dllm.load(name)
        ways = WAYS if model.facts.mask_token_id is not None else {"greedy": {}}
        for way, how in ways.items():
            start = time.perf_counter()
            result = {}
            for task in options.tasks:
                result |= accuracy(model, options.examples, [task], **how)
                print(f"{name:8} {way:20} {task:15} {result[task]:.3f}", flush=True)
            print(f"{name} {way}: {time.perf_counter() - start:.0f} s")
            results.setdefault(name, {})[way] = result
    write(options.output, {"examples": options.examples, "split": "test", "accuracy": results})


if __name__ == "__main__":
    main()
