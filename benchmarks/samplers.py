"""Every sampler at its paper's defaults on the bundled model: accuracy, NFE, speed, host time.

    python benchmarks/samplers.py --examples 200

Accuracy, forwards, tokens per forward and seconds per task on held-out prompts, and ratios of
forwards to threshold 0.9; then the host time of one decision for windows of 32 and 256 positions.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm
from dllm.canvas import Canvas
from dllm.eval.tasks import TASKS
from dllm.kernels.noise import uniform
from dllm.samplers import Prediction, compose

from report import RESULTS, write  # isort: skip

BASELINE = "threshold"
METHODS = (
    "llada", "dream", BASELINE, "factor", "eb", "dparallel", "localleap", "hierarchical", "klass",
    "r2", "threshold+credit", "adablock", "adablock+localleap", "dcd", "dsb", "slowfast",
    "prophet", "threshold+prophet", "ete", "lopa", "freedave", "freedave(threshold(tau=0.95))",
    "wino", "saber", "learn2pd", "learn2pd+eotp", "pc", "certainty_prior",
)  # fmt: skip
SLOW = {"llada", "dream", "prophet", "freedave", "saber", "pc", "certainty_prior"}
TASKS_SHOWN = ("story2", "sort", "insert", "remove_random", "insert_random", "latin")
BRANCHING = {"ete", "lopa", "freedave", "freedave(threshold(tau=0.95))", "wino"}


def measure(model: dllm.DiffusionModel, sampler: str, task: str, n: int) -> dict[str, float]:
    examples = TASKS[task].examples(n)
    start, results = time.perf_counter(), []
    for i in range(0, n, 50):
        prompts = [e.prompt for e in examples[i : i + 50]]
        results += dllm.generate(model, prompts, sampler=sampler)
    right = [TASKS[task].check(e, r.text) for e, r in zip(examples, results, strict=True)]
    tokens, nfe = sum(len(r.tokens) for r in results), sum(r.nfe for r in results)
    return {
        "accuracy": sum(right) / n,
        "nfe": nfe / n,
        "tokens_per_forward": tokens / nfe,
        "computed": sum(r.computed for r in results) / n,
        "forced": sum(r.forced for r in results) / n,
        "seconds": time.perf_counter() - start,
    }


def host_microseconds(spec: str, width: int, repeats: int = 400) -> float:
    """Median time of one decision over a fresh window, in microseconds."""
    sampler = compose(spec, options={}, facts={"delimiters": (3,), "block_length": width})
    rng = np.random.default_rng(0)
    times = []
    for i in range(repeats):
        canvas = Canvas.for_prompt(
            np.arange(16), width, mask_id=500, pad_id=0,
            noise=lambda stream, step, at, seed=i: uniform(seed, stream, at, step, 0),
        )  # fmt: skip
        sampler.prepare(canvas)
        at = sampler.targets(canvas)
        n = len(at)
        p = rng.uniform(0.2, 0.99, n).astype(np.float32)
        ids = sampler.asks(canvas, at)
        token = rng.integers(1, 400, n)
        numbers = {
            "margin": p, "gap": p, "entropy": 1 - p, "max_logprob": np.log(p),
            "kl": np.full(n, np.inf, np.float32), "top_token": token[:, None],
        }  # fmt: skip
        prediction = Prediction(
            at, token, np.log(p),
            **{name: numbers[name] for name in sampler.statistics & numbers.keys()},
            asked={name: np.log(np.full(wanted.shape, 0.1, np.float32))
                   for name, wanted in ids.items()},
        )  # fmt: skip
        start = time.perf_counter()
        sampler.decide(canvas, prediction)
        times.append(time.perf_counter() - start)
    return float(np.median(times) * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--slow-examples", type=int, help="for methods of one token per step")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS_SHOWN))
    parser.add_argument("--samplers", nargs="+", default=list(METHODS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "samplers.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = dllm.load("nano")
    host = {
        spec: {str(w): host_microseconds(spec, w) for w in (32, 256)}
        for spec in options.samplers
        if spec not in BRANCHING
    }
    found: dict[str, Any] = {}
    for spec in options.samplers:
        n = (options.slow_examples or options.examples) if spec in SLOW else options.examples
        found[spec] = {"examples": n, "tasks": {}}
        for task in options.tasks:
            found[spec]["tasks"][task] = measure(model, spec, task, n)
        rows = found[spec]["tasks"].values()
        accuracy = np.mean([row["accuracy"] for row in rows])
        nfe = np.mean([row["nfe"] for row in rows])
        found[spec]["host_microseconds"] = host.get(spec)
        print(f"{spec:30} accuracy {accuracy:.3f} nfe {nfe:6.2f} host {host.get(spec)}", flush=True)
        write(options.output, {"baseline": BASELINE, "tasks": options.tasks, "samplers": found})


if __name__ == "__main__":
    main()
