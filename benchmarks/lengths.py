"""Answers that find their length, against canvases of one length: accuracy, forwards, positions.

    python benchmarks/lengths.py                  # writes results/lengths.json
    python benchmarks/lengths.py --examples 8     # a quick look

The bundled model answers held-out prompts of its tasks, whose answers have 4 to 60 tokens, with one
cap for all.  Each rule is compared, example by example, with the canvas of the cap, and with the
fixed canvas that is best for each task: most right, then fewest positions (chosen on the same
examples, which favours it).  Forwards include probes; a share of the canvas is the answer's tokens
over the positions that its canvas had in the end.  The pool: how many rows of a session decode at a
time in a pool of one size, where answers reserve the cap or hold what they have.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from pathlib import Path
from statistics import mean
from typing import Any

import dllm
from dllm.eval.metrics import paired
from dllm.eval.tasks import TASKS
from dllm.request.holes import measured
from dllm.request.prompts import encode, encode_continuation, encode_text

from harness import RESULTS, write  # isort: skip

CAP = 96
FIXED = (8, 12, 16, 24, 32, 48, 64, CAP)
RULES = (
    "append(block=16)", "append(block=16, lookahead=0)", "append(block=32)",
    "daedal(initial=16)", "daedal(initial=64)",
    "daedal(initial=16, insert=False)",
)  # fmt: skip
POOL = 1200  # positions
HOLES = ("sum", "story2", "reverse", "copy", "sort")  # tasks


def answers(examples: list[Any], **how: Any) -> list[dict[str, Any]]:
    """What a way of decoding makes of every example."""
    block = min(16, how["max_new_tokens"])
    results = dllm.generate("nano", [example.prompt for example in examples], max_batch_size=32,
                            sampler="threshold", block_length=block, **how)  # fmt: skip
    return [
        {
            "right": TASKS[example.task].check(example, result.text), "nfe": result.nfe,
            "probes": result.probes, "computed": result.computed,
            "share": len(result.tokens) / result.canvas, "tokens": len(result.tokens),
        }
        for example, result in zip(examples, results, strict=True)
    ]  # fmt: skip


def summary(rows: list[dict[str, Any]], **others: list[dict[str, Any]]) -> dict[str, Any]:
    """Means, and the differences of accuracy to the ways in ``others``."""
    result: dict[str, Any] = {key: mean(row[key] for row in rows) for key in rows[0]}
    for name, other in others.items():
        pair = paired([row["right"] for row in rows], [row["right"] for row in other])
        result[name] = [pair.difference, pair.low, pair.high]
    return result


def pool(length: str | None, prompts: list[str]) -> dict[str, Any]:
    """A session with room for `POOL` positions, asked for everything at once."""
    rows: list[int] = []
    began = time.process_time()
    with dllm.Session(
        "nano", cache="dual", length=length, max_batch_size=256, max_positions=POOL,
        observe=lambda report: rows.append(report.rows),
    ) as session:  # fmt: skip
        handles = [session.submit(p, max_new_tokens=CAP, block_length=16) for p in prompts]
        results = [handle.result() for handle in handles]
    return {
        "rows": mean(rows), "most_rows": max(rows), "steps": len(rows),
        "restarts": sum(result.restarts for result in results),
        "forwards": mean(result.nfe for result in results),
        "computed": mean(result.computed for result in results),
        "seconds": time.process_time() - began,
    }  # fmt: skip


def holes(count: int, seed: int) -> dict[str, Any]:
    """How often a hole ``[[1..24]]`` of some words of a known answer is found exactly."""
    model, draw, wanted = dllm.load("nano"), random.Random(seed), list[tuple[Any, str, int]]()
    for example in (e for name in HOLES for e in TASKS[name].examples(count, seed)):
        answer = example.answer
        words = [match.start() for match in re.finditer(r"(?<=[ ,])", answer)]
        if len(words) < 4:
            continue
        first = draw.randrange(0, len(words) - 2)
        last = min(len(words) - 1, first + draw.randrange(1, 6))
        left, right = answer[: words[first]], answer[words[last] :]
        tokenizer = model.tokenizer
        around = len(encode_text(tokenizer, left)) + len(encode_continuation(tokenizer, right))
        size = len(encode_text(tokenizer, answer)) - around
        if size > 0:
            wanted.append((encode(model, example.prompt), f"{left}[[1..24]]{right}", size))
    errors = [int(measured(model, text, ids).holes.sum()) - n for ids, text, n in wanted]
    return {"holes": len(wanted), "exact": errors.count(0),
            "off_by_one": sum(abs(e) == 1 for e in errors)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=32, help="of each task")
    parser.add_argument("--output", type=Path, default=RESULTS / "lengths.json")
    options = parser.parse_args()
    examples = [e for task in TASKS.values() for e in task.examples(options.examples)]
    fixed = {size: answers(examples, max_new_tokens=size) for size in FIXED}
    best = []  # of each task
    for first in range(0, len(examples), options.examples):
        here = slice(first, first + options.examples)

        def quality(size: int, here: slice = here) -> tuple[float, float]:
            rows = fixed[size][here]
            return sum(row["right"] for row in rows), -mean(row["computed"] for row in rows)

        best += fixed[max(FIXED, key=quality)][here]
    cases: dict[str, Any] = {}
    named: dict[str, list[dict[str, Any]] | None] = {f"fixed {n}": r for n, r in fixed.items()}
    for name, known in (named | {"best fixed of each task": best} | dict.fromkeys(RULES)).items():
        rows = answers(examples, max_new_tokens=CAP, length=name) if known is None else known
        cases[name] = summary(rows, cap=fixed[CAP], best=best)
        print(name, {k: [round(x, 3) for x in v] if isinstance(v, list) else round(v, 3)
                     for k, v in cases[name].items()}, flush=True)  # fmt: skip
    prompts = [example.prompt for example in examples]
    pools = {str(rule): pool(rule, prompts) for rule in (None, "append(block=16)")}
    for rule, found in pools.items():
        print(rule, found, flush=True)
    measured_holes = {"chosen on": holes(12, 0), "fresh": holes(36, 1)}
    print("holes", measured_holes, flush=True)
    tokens = sorted(row["tokens"] for row in fixed[CAP])
    write(options.output, {
        "model": "nano", "cap": CAP, "examples": len(examples), "tasks": list(TASKS),
        "tokens": [tokens[0], tokens[len(tokens) // 2], tokens[-1]], "pool": POOL,
        "cases": cases, "pools": pools, "holes": measured_holes,
    })  # fmt: skip


if __name__ == "__main__":
    main()
