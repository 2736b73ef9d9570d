"""The number of threads that is chosen, against every fixed one, idle and beside a busy program.

    python benchmarks/threads.py                              # nano, 135M and SmolLM2
    python benchmarks/threads.py --models nano --cases idle   # one of them, about half a minute

For every way, the choice and each fixed number, there are three processes, as processes differ,
that load the model and then wait.  They take turns; in a turn a process decodes for `--seconds`.
Medians over turns, then over processes.  `busy` starts a program that computes on every processor
but one (at least one) before anything is loaded.  Cases that are measured are replaced in
results/threads.json, others stay.
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
CASES = ("idle", "busy")
BUSY = "while True: sum(range(100000))"


def worker(name: str, seconds: float) -> None:
    """Load a model, warm up, then decode for so long at every line that comes in."""
    import torch

    import dllm

    from real import smollm2  # isort: skip
    from shapes import llada_135m  # isort: skip

    start = time.perf_counter()
    model = {"nano": lambda: dllm.load("nano"), "135m": llada_135m, "smollm2": smollm2}[name]()
    loading = time.perf_counter() - start
    prompts: list[Any] = [[1 + i % 97 for i in range(64)]] * 4

    def decode() -> None:
        if name == "smollm2":
            dllm.speculate(model, "prompt_lookup", prompts, max_new_tokens=16)
        else:
            options = {"eos_policy": "none"} if name == "135m" else {}
            tokens = 16 if name == "135m" else 24
            dllm.generate(
                model, prompts, cache="dual", max_new_tokens=tokens, block_length=8, **options
            )

    decode()
    print(json.dumps({"threads": torch.get_num_threads(), "loading": loading}), flush=True)
    for _ in sys.stdin:
        wall, processor, calls = time.perf_counter(), time.process_time(), 0
        while calls == 0 or time.perf_counter() - wall < seconds:
            decode()
            calls += 1
        taken = time.perf_counter() - wall, time.process_time() - processor
        print(json.dumps({"seconds": taken[0] / calls, "processor": taken[1] / calls}), flush=True)


def begun(name: str, threads: int | None, seconds: float) -> subprocess.Popen[str]:
    """A process that has loaded and waits; None leaves the choice to the library."""
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    given = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", name, "--seconds", str(seconds)], env=kept | given,
        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    """The next line of JSON; libraries may print others."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            said: dict[str, float] = json.loads(line)
            return said
    raise SystemExit(f"{' '.join(map(str, process.args))} ended early")  # type: ignore[arg-type]


def turn(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return answer(process)


def case(name: str, busy: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Wall and processor seconds of a decoding with every way."""
    processors = len(os.sched_getaffinity(0))
    ways = ["chosen", *(str(n) for n in range(1, processors + 1))]
    others = [
        subprocess.Popen([sys.executable, "-c", BUSY])
        for _ in range(max(1, processors - 1) if busy else 0)
    ]
    processes: dict[tuple[str, int], subprocess.Popen[str]] = {}
    chosen: list[int] = []
    try:
        for i in range(options.processes):
            for way in ways:  # one after the other: they would disturb each other
                threads = None if way == "chosen" else int(way)
                processes[way, i] = begun(name, threads, options.seconds)
                said = answer(processes[way, i])
                if threads is None:
                    chosen.append(int(said["threads"]))
        taken: dict[tuple[str, int], list[dict[str, float]]] = {each: [] for each in processes}
        for _ in range(options.turns):
            for each, process in processes.items():
                taken[each].append(turn(process))
    finally:
        for process in [*processes.values(), *others]:
            process.kill()
            process.wait()

    def of_processes(way: str, what: str) -> list[float]:
        return [median(t[what] for t in runs) for each, runs in taken.items() if each[0] == way]

    wall = {way: of_processes(way, "seconds") for way in ways}
    seconds = {way: median(each) for way, each in wall.items()}
    best = min(ways[1:], key=lambda way: seconds[way])
    return {
        "model": name, "busy": busy, "best": int(best), "chosen": chosen,
        "ratio": seconds["chosen"] / seconds[best], "seconds": seconds, "processes": wall,
        "processor": {way: median(of_processes(way, "processor")) for way in ways},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--processes", type=int, default=3, help="with every way")
    parser.add_argument("--turns", type=int, default=5, help="of every process")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn, at least")
    parser.add_argument("--worker", help="wait with this model for turns, for use by this program")
    parser.add_argument("--output", type=Path, default=RESULTS / "threads.json")
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.seconds)
        return
    before = json.loads(options.output.read_text())["cases"] if options.output.exists() else []
    cases = {(each["model"], each["busy"]): each for each in before}
    for name in options.models:
        for which in options.cases:
            busy = which == "busy"
            cases[name, busy] = case(name, busy, options)
            print(json.dumps(cases[name, busy]), flush=True)
            write(options.output, {"cases": list(cases.values())})


if __name__ == "__main__":
    main()
