"""The number of threads that is chosen, against every fixed one, idle and beside a busy program.

    python benchmarks/threads.py             # nano, 135M and SmolLM2; writes results/threads.json
    python benchmarks/threads.py --models nano --runs 3

Every run is a process of its own: it loads the model, decodes once to warm up, and takes the wall
time of a second decoding and its processor time.  Runs of one case take turns.  `busy` starts a
program that computes on every processor but one (at least one) all the while.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from report import RESULTS, write  # isort: skip

MODELS = ("nano", "135m", "smollm2")
BUSY = "while True: sum(range(100000))"


def decode(name: str) -> dict[str, float]:
    """Seconds of a decoding with whatever number of threads there is."""
    import torch

    import dllm

    from real import smollm2  # isort: skip
    from shapes import llada_135m  # isort: skip

    model = {"nano": lambda: dllm.load("nano"), "135m": llada_135m, "smollm2": smollm2}[name]()
    prompts: list[Any] = [[1 + i % 97 for i in range(64)]] * 4

    def run() -> None:
        if name == "smollm2":
            dllm.speculate(model, "lookup", prompts, max_new_tokens=32)
        else:
            options = {"eos_policy": "none"} if name == "135m" else {}
            tokens = 32 if name == "135m" else 24
            dllm.generate(
                model, prompts, cache="dual", max_new_tokens=tokens, block_length=8, **options
            )

    run()
    wall, processor = time.perf_counter(), time.process_time()
    run()
    return {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor,
            "threads": torch.get_num_threads()}  # fmt: skip


def measured(name: str, threads: int | None) -> dict[str, float]:
    """The same in a process of its own; None leaves the choice to the library."""
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    given = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, __file__, "--one", name], env=kept | given, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def case(name: str, busy: bool, runs: int) -> dict[str, Any]:
    """Median wall and processor seconds of the choice and of every fixed number, in turns."""
    processors = len(os.sched_getaffinity(0))
    ways = [None, *range(1, processors + 1)]
    others = [
        subprocess.Popen([sys.executable, "-c", BUSY])
        for _ in range(max(1, processors - 1) if busy else 0)
    ]
    try:
        taken: dict[Any, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(runs):
            for way in ways:
                taken[way].append(measured(name, way))
    finally:
        for other in others:
            other.kill()
            other.wait()
    middle = {way: median(run["seconds"] for run in each) for way, each in taken.items()}
    best = min((way for way in ways if way is not None), key=lambda way: middle[way])
    return {
        "model": name, "busy": busy, "best": best, "ratio": middle[None] / middle[best],
        "chosen": [run["threads"] for run in taken[None]],
        "seconds": {str(way or "chosen"): seconds for way, seconds in middle.items()},
        "processor": {str(way or "chosen"): median(run["processor"] for run in each)
                      for way, each in taken.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--runs", type=int, default=3, help="of every number, in turns")
    parser.add_argument("--one", help="decode one model in this process, and print seconds")
    parser.add_argument("--output", type=Path, default=RESULTS / "threads.json")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(decode(options.one)))
        return
    cases = []
    for name in options.models:
        for busy in (False, True):
            cases.append(case(name, busy, options.runs))
            print(json.dumps(cases[-1]), flush=True)
    write(options.output, {"cases": cases})


if __name__ == "__main__":
    main()
