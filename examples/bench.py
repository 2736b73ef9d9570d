"""Two samplers as curves: accuracy against tokens per forward, with intervals.

    python examples/bench.py

`dllm bench` does the same from a shell, resumes what was stopped, and draws plots.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import dllm
from dllm.eval.report import fastest_table, full_table
from dllm.eval.sweep import Journal, Sweep, run

SWEEP = Sweep(
    tasks=["sort"],
    curves=["threshold"],  # put another name here: its parameters come from dllm.eval.curves
    samplers=["factor(factor={0.5,1})"],
    examples=16,
    arguments=(("max_new_tokens", 32),),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "results.jsonl")
        records = run(dllm.load("nano"), SWEEP.cells(), journal)
    print(full_table(records))
    print()
    print(fastest_table(records))


if __name__ == "__main__":
    main()
