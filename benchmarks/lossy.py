"""What lossy acceptance changes: divergence from the verifier's own texts beside the forwards.

    python benchmarks/lossy.py            # 240 prompts, temperatures 0 and 1
    python benchmarks/lossy.py --quick

nano-ar verifies, nano drafts, on held-out prompts of every generated task; nothing here is a time.
Plain decoding with the same noise is what every rule is held to: the share of equal texts, the
difference of accuracy with its 95 % interval (paired by prompt), and how likely the verifier itself
finds the texts, in nats per token.  The classifier of ``pivot`` is fitted here, on prompts of
another seed: `label_pivots` continues each refused token to its end and looks whether the answer's
correctness changes.  Writes ``results/lossy.json``;
its table is in docs/drafting-reference.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm
from dllm.drafting.accept.lossy import fit_pivot
from dllm.drafting.pivots import label_pivots
from dllm.eval.metrics import paired
from dllm.eval.tasks import TASKS

from report import RESULTS, write  # isort: skip

RULES = ("plain", "keyed", "fly", "pivot(0.5)", "pivot(0.3)")
NEW, LENGTH = 64, "fixed(k=12)"  # `adaptive` would follow the clock of the machine


def examples(per_task: int, seed: int) -> list[tuple[str, Any]]:
    return [(name, e) for name in TASKS for e in TASKS[name].examples(per_task, seed)]


def fitted(verifier: Any, drafter: Any, per_task: int, path: Path) -> tuple[int, int]:
    """Write the classifier of ``pivot``; how many tokens it was fitted on, and pivotal ones."""
    cases = examples(per_task, seed=7)
    features, pivotal = label_pivots(
        verifier, drafter, [e.prompt for _, e in cases],
        [lambda text, n=n, e=e: TASKS[n].check(e, text) for n, e in cases], max_new_tokens=NEW,
    )  # fmt: skip
    fit_pivot(features, pivotal, path)
    return len(features), sum(pivotal)


def measured(
    verifier: Any, drafter: Any, rule: str, path: Path, cases: list[tuple[str, Any]],
    temperature: float,
) -> list[dict[str, Any]]:  # fmt: skip
    """One entry per prompt."""
    name, _, threshold = rule.rstrip(")").partition("(")
    how = {"rule": f"pivot(path={str(path)!r}, threshold={threshold})"} if threshold else (
        {} if rule == "plain" else {"rule": name}
    )  # fmt: skip
    results = dllm.speculate(
        verifier, None if rule == "plain" else drafter, [e.prompt for _, e in cases],
        max_new_tokens=NEW, temperature=temperature, max_batch_size=16, controller=LENGTH, **how,
    )  # fmt: skip
    return [
        {"task": task, "tokens": list(map(int, r.tokens)), "forwards": r.nfe,
         "deviations": r.deviations, "right": bool(TASKS[task].check(e, r.text)),
         "nats": -float(np.sum(r.logprobs, dtype=np.float64))}
        for (task, e), r in zip(cases, results, strict=True)
    ]  # fmt: skip


def texts(rows: list[dict[str, Any]]) -> list[list[int]]:
    return [row["tokens"] for row in rows]


def summary(own: list[dict[str, Any]], plain: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(map(len, texts(own)))
    change = paired([r["right"] for r in own], [r["right"] for r in plain])
    return {
        "forwards": sum(r["forwards"] for r in own),
        "tokens": tokens,
        "saved": sum(r["forwards"] for r in plain) / sum(r["forwards"] for r in own),
        "same": float(np.mean([a == b for a, b in zip(texts(own), texts(plain), strict=True)])),
        "accuracy": float(np.mean([r["right"] for r in own])),
        "points": 100 * change.difference, "low": 100 * change.low, "high": 100 * change.high,
        "nats": sum(r["nats"] for r in own) / tokens,
        "deviations": sum(r["deviations"] for r in own) / tokens,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=15, help="per task")
    parser.add_argument("--fit", type=int, default=15, help="prompts per task for the classifier")
    parser.add_argument("--quick", action="store_true", help="one prompt per task, no files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.examples = options.fit = 1
    verifier, drafter = dllm.load("nano-ar"), dllm.load("nano")
    cases = examples(options.examples, seed=0)
    result: dict[str, Any] = {"prompts": len(cases), "temperatures": {}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pivot.json"
        result["labelled"], result["pivotal"] = fitted(verifier, drafter, options.fit, path)
        for temperature in (0.0, 1.0):
            rules = result["temperatures"][f"{temperature:g}"] = {}
            plain: list[dict[str, Any]] = []
            for rule in RULES:
                own = measured(verifier, drafter, rule, path, cases, temperature)
                plain = plain or own
                rules[rule] = summary(own, plain)
                print(temperature, rule, rules[rule], flush=True)
    if not options.quick:
        write(RESULTS / "lossy.json", result)


if __name__ == "__main__":
    main()
