"""What `official=True` changes: the paper's rule against the released code's, on the bundled model.

    python benchmarks/official.py             # 16 prompts of every task
    python benchmarks/official.py --quick

Writes ``results/official.json``, which `benchmarks/fidelity.py` puts into docs/fidelity.md.  Counts
and accuracies; nothing here is a time.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

import dllm
from dllm.eval.metrics import paired
from dllm.eval.tasks import TASKS

from report import RESULTS, write  # isort: skip

PAIRS = {
    "klass": ("klass", "klass(official=True)"),
    "factor": ("factor", "factor(official=True)"),
}
NEW = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=16, help="per task")
    parser.add_argument("--quick", action="store_true", help="one prompt per task, no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = dllm.load("nano")
    n = 1 if options.quick else options.examples
    cases = [(TASKS[name], e) for name in TASKS for e in TASKS[name].examples(n, 0)]
    result: dict[str, Any] = {"prompts": len(cases), "samplers": {}}
    for name, specs in PAIRS.items():
        right, nfe = [], []
        for spec in specs:
            outs = dllm.generate(
                model,
                [e.prompt for _, e in cases],
                sampler=spec,
                max_new_tokens=NEW,
                max_batch_size=32,
            )
            right.append([task.check(e, o.text) for (task, e), o in zip(cases, outs, strict=True)])
            nfe.append(float(np.mean([o.nfe for o in outs])))
        change = paired(right[1], right[0])
        result["samplers"][name] = {
            "default": {"right": float(np.mean(right[0])), "nfe": nfe[0]},
            "official": {"right": float(np.mean(right[1])), "nfe": nfe[1]},
            "points": 100 * change.difference, "low": 100 * change.low, "high": 100 * change.high,
        }  # fmt: skip
        print(name, result["samplers"][name], flush=True)
    if not options.quick:
        write(RESULTS / "official.json", result)


if __name__ == "__main__":
    main()
