"""Quality follows load: accuracy and latency of `nano` by load, with and without ``under_load``.

    python benchmarks/under_load.py                  # then: python benchmarks/readme.py

Held-out prompts of all tasks arrive as a Poisson process, on a clock of processor time that runs
while the engine works, so that what else the machine does hardly matters.  All ways see the same
prompts at the same times.  Loads are multiples of what `llada` answers when it is never idle.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm
from dllm.cache import compose
from dllm.engine import Engine
from dllm.errors import DllmError
from dllm.eval.plot import new_figure
from dllm.eval.tasks import TASKS
from dllm.preparation import Preparation
from dllm.scheduler import Scheduler

from report import RESULTS, write  # isort: skip

WAYS: tuple[tuple[str, str | None], ...] = (  # sampler, and what it becomes under load
    ("llada", None), ("llada", "threshold(tau=0.7)"),
    ("threshold", None), ("threshold", "threshold(tau=0.7)"),
)  # fmt: skip
QUEUES = 3.0  # the load from which on `llada` would only queue
NEW, CACHE, BLOCK = 64, "dual", 16


def asked(count: int, seed: int) -> list[Any]:
    """Held-out examples, every task as often as the others."""
    each = -(-count // len(TASKS))
    examples = [example for task in TASKS.values() for example in task.examples(each, seed)]
    random.Random(seed).shuffle(examples)
    return examples[:count]


def drive(
    model: Any, sampler: str, loose: str | None, rows: int, examples: list[Any],
    arrivals: list[float],
) -> tuple[list[float], list[Any]]:  # fmt: skip
    """Seconds from each of ``arrivals`` to its answer, and the results."""
    how = {"max_new_tokens": NEW, "block_length": BLOCK}
    base = Preparation.for_session(model, CACHE, sampler, under_load=loose, **how)
    requests = base.prompts([example.prompt for example in examples])
    for request in requests:
        request.loose = None if loose is None else base.loosened(loose)
    arrived = dict(zip(requests, arrivals, strict=True))
    scheduler = Scheduler(model, Engine(model, compose(CACHE, model.family.name), max_rows=rows))
    coming, clock, ends = list(reversed(requests)), 0.0, {}
    while coming or scheduler.busy:
        if not scheduler.busy:
            clock = max(clock, arrived[coming[-1]])
        while coming and arrived[coming[-1]] <= clock:
            scheduler.add(coming.pop())
        began = time.process_time()
        progress = scheduler.advance()
        clock += time.process_time() - began
        for request, _ in progress:
            if request.done:
                ends[request] = clock - arrived[request]
    scheduler.close()
    return [ends[request] for request in requests], [request.result for request in requests]


def draw(points: list[dict[str, Any]], file: Path) -> None:
    """Right answers and p90 by load, a line per way."""
    with new_figure(7.2, 2.8, [file]) as figure:
        for axes, what in zip(figure.subplots(1, 2), ("accuracy", "p90"), strict=True):
            for (sampler, loose), style in zip(WAYS, ("o--", "o-", "s--", "s-"), strict=True):
                mine = [p for p in points if (p["sampler"], p["under_load"]) == (sampler, loose)]
                axes.plot([p["load"] for p in mine], [p[what] for p in mine], style, markersize=4,
                          label=f"{sampler}, under load {loose or 'the same'}")  # fmt: skip
            axes.set_title("right answers" if what == "accuracy" else "p90, seconds", fontsize=9)
            axes.set_xlabel("load", fontsize=8)
        axes.set_yscale("log")
        figure.axes[0].set_ylim(0, 1)
        figure.axes[0].legend(fontsize=6)
        figure.tight_layout()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8, 1, 1.5, 2.5, 5, 8])
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--output", type=Path, default=RESULTS / "under_load.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = dllm.load("nano")
    examples = asked(given.requests, 0)
    at_once = [0.0] * given.requests
    drive(model, *WAYS[0], given.rows, examples[:16], at_once[:16])  # warm
    seconds = max(drive(model, *WAYS[0], given.rows, examples, at_once)[0]) / given.requests
    points: list[dict[str, Any]] = []
    for load in given.loads:
        rng = random.Random(int(1000 * load))
        gaps = [rng.expovariate(load / seconds) for _ in range(given.requests)]
        arrivals = np.cumsum([0.0, *gaps[1:]]).tolist()
        for sampler, loose in WAYS if load < QUEUES else WAYS[2:]:
            late, results = drive(model, sampler, loose, given.rows, examples, arrivals)
            right = [TASKS[e.task].check(e, r.text) for e, r in zip(examples, results, strict=True)]
            forwards = sum(r.nfe for r in results)
            points.append({
                "sampler": sampler, "under_load": loose, "load": load,
                "accuracy": round(sum(right) / len(right), 4),
                "p50": round(float(np.percentile(late, 50)), 4),
                "p90": round(float(np.percentile(late, 90)), 4),
                "loosened": round(sum(r.loosened for r in results) / forwards, 3),
                "forwards": forwards,
            })  # fmt: skip
            print(points[-1], flush=True)
    write(given.output, {
        "model": "nano", "rows": given.rows, "requests": given.requests, "new": NEW,
        "cache": CACHE, "block": BLOCK,
        "seconds": seconds, "points": points,
    })  # fmt: skip
    try:
        draw(points, RESULTS.parents[1] / "docs" / "under_load.svg")
    except DllmError as error:  # no matplotlib: the figures stand in the file
        print(f"no picture: {error}")


if __name__ == "__main__":
    main()
