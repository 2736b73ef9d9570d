"""Every sampler at its paper's defaults on the bundled model: accuracy, NFE, positions.

    python benchmarks/samplers.py
    python benchmarks/samplers.py --model runs/convert/model --cache block \
        --tasks copy reverse insert remove sum story1 --samplers threshold s2d2 \
        --output benchmarks/results/samplers_blocks.json

Per task, on 200 held-out prompts: accuracy, forwards, tokens per forward, computed positions and
processor seconds.  What `results/samplers.json` already holds is kept (``--fresh`` starts over), so
it can be interrupted.  Processor seconds of one thread, because they suffer least from whatever
else the machine does.
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
from dllm.eval.tasks import TASKS

from harness import RESULTS, write  # isort: skip

BASELINE = "threshold"
METHODS = (
    BASELINE, "llada", "dream", "factor", "eb", "dparallel", "d3llm",
    "localleap", "hierarchical", "r2", "threshold+credit", "adablock",
    "adablock+localleap", "dcd", "dsb", "prophet", "threshold+prophet", "ete", "lopa",
    "freedave", "freedave(threshold(tau=0.95))",
    "edit",
    "wedlm", "remdm",
)  # fmt: skip


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--cache", default="none")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--samplers", nargs="+", default=list(METHODS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--output", type=Path, default=RESULTS / "samplers.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {}
    if options.output.exists() and not options.fresh:
        result = json.loads(options.output.read_text())["samplers"]

    def keep() -> None:
        write(options.output, {"baseline": BASELINE, "samplers": result})

    model = dllm.load(options.model)
    for spec in options.samplers:
        tasks = result.setdefault(spec, {"tasks": {}})["tasks"]
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
