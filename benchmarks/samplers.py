"""Every sampler at its paper's defaults on the bundled model: accuracy, NFE, speed, host time.

    python benchmarks/samplers.py
    python benchmarks/samplers.py --model runs/convert/model --cache block --host-time no \
        --tasks copy reverse insert remove sum story1 --samplers threshold s2d2 \
        --output benchmarks/results/samplers_blocks.json

Per task, on 200 held-out prompts: accuracy, forwards, tokens per forward, computed positions and
processor seconds; then the host time of one decision for windows of 32 and 256 positions.  What
`results/samplers.json` already holds is kept (``--fresh`` starts over), so it can be interrupted.
Processor seconds of one thread, because they suffer least from whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import dllm
from dllm.core.canvas import Canvas
from dllm.eval.tasks import TASKS
from dllm.kernels.noise import uniform
from dllm.samplers import Prediction, compose

from harness import RESULTS, write  # isort: skip

BASELINE = "threshold"
METHODS = (
    BASELINE, "llada", "dream", "factor", "eb", "dparallel", "d3llm",
    "localleap", "hierarchical", "klass", "r2", "threshold+credit", "adablock",
    "adablock+localleap", "dcd", "dsb", "prophet", "threshold+prophet", "ete", "lopa",
    "freedave", "freedave(threshold(tau=0.95))", "wino", "learn2pd", "learn2pd+eotp",
    "certainty_prior", "edit", "edit(mode=low_prob)",
    "dawn", "wedlm", "remdm",
)  # fmt: skip
BRANCHING = {"ete", "lopa", "freedave", "freedave(threshold(tau=0.95))", "wino", "dawn", "s2d2"}


def measure(
    model: dllm.DiffusionModel, sampler: str, cache: str, task: str, n: int
) -> dict[str, Any]:
    examples = TASKS[task].examples(n)
    start, results = time.process_time(), []
    for i in range(0, n, 50):
        prompts = [e.prompt for e in examples[i : i + 50]]
        results += dllm.generate(model, prompts, sampler=sampler, cache=cache)
    seconds = time.process_time() - start
    right = [TASKS[task].check(e, r.text) for e, r in zip(examples, results, strict=True)]
    tokens, nfe = sum(len(r.tokens) for r in results), sum(r.nfe for r in results)
    return {
        "examples": n,
        "accuracy": sum(right) / n,
        "nfe": nfe / n,
        "tokens_per_forward": tokens / nfe,
        "computed": sum(r.computed for r in results) / n,
        "forced": sum(r.forced for r in results) / n,
        "seconds": seconds,
        "right": np.packbits(right).tobytes().hex(),  # for paired comparisons
    }


def flags(cell: dict[str, Any]) -> npt.NDArray[np.bool_]:
    """(n,) which prompts were answered rightly."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(cell["right"]), np.uint8))
    return bits[: cell["examples"]].astype(np.bool_)


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
        at, ids = sampler.reads(canvas)
        n = len(at)
        p = rng.uniform(0.2, 0.99, n).astype(np.float32)
        token = rng.integers(1, 400, n)
        numbers = {
            "margin": p, "gap": p, "entropy": 1 - p, "max_logprob": np.log(p),
            "kl": np.full(n, np.inf, np.float32), "top_token": np.stack([token, token + 1], 1),
            "top_logprob": np.log(np.stack([p, (1 - p) / 2], 1)),
        }  # fmt: skip
        prediction = Prediction(
            at, token, np.log(p),
            **{name: numbers[name] for name in sampler.statistics.keys() & numbers.keys()},
            asked={name: np.log(np.full((n, wanted.shape[1]), 0.1, np.float32))
                   for name, wanted in ids.items()},
        )  # fmt: skip
        start = time.perf_counter()
        sampler.decide(canvas, prediction)
        times.append(time.perf_counter() - start)
    return float(np.median(times) * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--cache", default="none")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--samplers", nargs="+", default=list(METHODS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument(
        "--host-time",
        choices=("yes", "no", "only"),
        default="yes",
        help="the host's time where it is missing, not at all, or only that again",
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "samplers.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {}
    if options.output.exists() and not options.fresh:
        result = json.loads(options.output.read_text())["samplers"]

    def keep() -> None:
        write(options.output, {"baseline": BASELINE, "samplers": result})

    for spec in options.samplers:
        entry = result.setdefault(spec, {"tasks": {}})
        again = options.host_time == "only"
        missing = options.host_time == "yes" and "host_microseconds" not in entry
        if spec not in BRANCHING and (again or missing):
            entry["host_microseconds"] = {str(w): host_microseconds(spec, w) for w in (32, 256)}
            print(f"{spec:30} host {entry['host_microseconds']}", flush=True)
    keep()
    model = dllm.load(options.model)
    for spec in () if options.host_time == "only" else options.samplers:
        tasks = result[spec]["tasks"]
        for task in options.tasks:
            if tasks.get(task, {}).get("examples") != options.examples:
                tasks[task] = measure(model, spec, options.cache, task, options.examples)
                keep()
        result[spec]["tasks"] = tasks = {task: tasks[task] for task in TASKS if task in tasks}
        keep()
        accuracy, nfe = (np.mean([row[k] for row in tasks.values()]) for k in ("accuracy", "nfe"))
        print(f"{spec:30} accuracy {accuracy:.3f} nfe {nfe:6.2f}", flush=True)


if __name__ == "__main__":
    main()
