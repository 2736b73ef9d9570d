"""What training for parallel decoding gives: the tasks on which nano needs several forwards.

    python benchmarks/distilled.py base=nano trained=runs/parallel/model --examples 100
    python benchmarks/distilled.py base=nano repaired=... --samplers "threshold(0.5)+edit(tau=0.5)"
    python benchmarks/distilled.py base=nano fast=... --plot docs/trained.svg

Every model answers the same held-out prompts with every sampler.  A setting is compared with the
first sampler on the first model: tokens per forward, accuracy, exact McNemar over all prompts.
Cells that the output holds are not measured again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dllm
from dllm.eval.measure import Cell, Setting, fingerprint, measure
from dllm.eval.metrics import paired
from dllm.eval.plot import new_figure
from dllm.eval.tasks import TASKS

# where threshold(0.9) takes more than two forwards on the base model and is ever right
SLOW = ("story2", "shuffle", "insert_random", "remove_random", "replace_random")
TAUS = tuple(f"threshold({tau})" for tau in (0.9, 0.95, 0.8, 0.7, 0.6, 0.5))
KEPT = ("task", "sampler", "right", "tokens", "nfe", "seed")
RESULTS = Path(__file__).parent / "results" / "distilled.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="name=folder; the first one is compared with")
    parser.add_argument("--samplers", nargs="*", default=TAUS)
    parser.add_argument("--tasks", nargs="*", default=SLOW, choices=list(TASKS))
    parser.add_argument("--examples", type=int, default=100, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="draw what the output then holds of these models")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    known: dict[str, Any] = {}
    if given.output.exists():
        known = json.loads(given.output.read_text(encoding="utf-8"))
    outcomes: dict[str, dict[str, dict[str, list[int]]]] = {}
    for pair in given.models:
        name, _, source = pair.partition("=")
        model = dllm.load(source, dtype="float32")
        identity = fingerprint(model)
        for sampler in given.samplers:
            parts = []
            for task in given.tasks:
                cell = Cell(task, Setting(name, sampler), given.examples, given.seed, 64)
                key = f"{name}/{cell.key(identity)}"
                if key not in known:
                    record = asdict(measure(model, TASKS[task], cell, identity))
                    known[key] = {"model": name} | {field: record[field] for field in KEPT}
                    given.output.write_text(json.dumps(known) + "\n", encoding="utf-8")
                parts.append(known[key])
            joined = {f: [x for part in parts for x in part[f]] for f in ("right", "tokens", "nfe")}
            outcomes.setdefault(name, {})[sampler] = joined
            print(row(name, sampler, outcomes), flush=True)
    if given.plot:
        plot(list(known.values()), list(outcomes), given.plot)


def plot(cells: list[dict[str, Any]], models: list[str], file: Path) -> None:
    """Accuracy against tokens per forward: the thresholds of every model, and other samplers on the
    first one, over all tasks."""
    points: dict[tuple[str, str], tuple[float, float]] = {}
    for key in dict.fromkeys((cell["model"], cell["sampler"]) for cell in cells):
        mine = [cell for cell in cells if (cell["model"], cell["sampler"]) == key]
        if {cell["task"] for cell in mine} >= set(SLOW):
            right, tokens, nfe = (
                [x for c in mine for x in c[f]] for f in ("right", "tokens", "nfe")
            )
            points[key] = (sum(tokens) / sum(nfe), 100 * sum(right) / len(right))
    with new_figure(6.4, 3.8, [file]) as figure:
        axes = figure.subplots()
        for name in models:
            line = sorted(points[name, tau] for tau in TAUS if (name, tau) in points)
            axes.plot(*zip(*line, strict=True), marker="o", markersize=3, label=name)
        for (name, sampler), (x, y) in points.items():
            if name == models[0] and sampler not in TAUS and "edit" not in sampler:
                axes.plot([x], [y], marker="x", color="grey", linestyle="none")
                axes.annotate(
                    sampler, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=6
                )
        axes.set(xlabel="tokens per forward", ylabel="% right", xscale="log")
        axes.set_xticks([3, 4, 6, 8, 12], ["3", "4", "6", "8", "12"])
        axes.minorticks_off()
        axes.legend(fontsize=7)
        figure.tight_layout()


def row(name: str, sampler: str, outcomes: dict[str, dict[str, dict[str, list[int]]]]) -> str:
    """A line of the table."""
    here = outcomes[name][sampler]
    base = next(iter(next(iter(outcomes.values())).values()))
    rate, slow = (sum(one["tokens"]) / sum(one["nfe"]) for one in (here, base))
    share = 100 * sum(here["right"]) / len(here["right"])
    test = paired(here["right"], base["right"])
    return (f"| {name} | `{sampler}` | {rate:.2f} | {rate / slow:.2f} | {share:.1f} | "
            f"{100 * test.difference:+.1f} ({100 * test.low:+.1f} to {100 * test.high:+.1f}) | "
            f"{test.p_value:.2g} | {len(here['right'])} |")  # fmt: skip


if __name__ == "__main__":
    main()
