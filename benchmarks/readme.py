"""Write the measured parts of README, documentation and model card from the committed JSON.

python benchmarks/readme.py          # rewrite them
python benchmarks/readme.py --check  # exit 1 if they are not up to date
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dllm.eval.measure import Record
from dllm.eval.metrics import holm, paired
from dllm.eval.plot import multiples, pareto
from dllm.eval.report import COMMON, REFERENCE, area_table, cache_table, fastest_table
from dllm.eval.report import markdown as table
from dllm.eval.sweep import Journal

from cache_memory import plot  # isort: skip
from harness import RESULTS  # isort: skip
from samplers import flags  # isort: skip
from step_tables import official  # isort: skip
from tables import conditions, joining, load, pages, setting  # isort: skip

ROOT = Path(__file__).parents[1]
SWEEP = "readme.jsonl"  # of `dllm bench --preset readme`
KNOWN_CACHES = ("none", "dual", "dkv", "window_diffusion")


def speed() -> str:
    """Ratios, each measured side by side in one run."""
    head = load("kernels_llada")
    parts = [
        f"Float32, torch {head['machine']['torch']}.  Ratios come from one run each; compare them, "
        "not seconds.",
        "**Logits are never stored**: statistics of R positions at LLaDA's head shape "
        "(4096 → 126,464) against the bare matrix product, and extra memory against the float64 "
        f"softmax over all logits of the official loops ({conditions(head)}):",
        table(
            ["R", "time / bare product", "extra memory", "float64 softmax"],
            [head_row(case) for case in head["results"] if case["dtype"] == "float32"],
        ),
        headline_caches(),
    ]
    return "\n\n".join(parts)


def headline_caches() -> str:
    """Positions and time of the best-known caches on the 135M shape."""
    caches = load("caches")
    known = [case for case in caches["cases"] if case["cache"] in KNOWN_CACHES]
    return (
        f"**Caches** (135M parameters, LLaDA-shaped, random weights, prompt {caches['prompt']}, "
        f"{caches['new']} new tokens, blocks of {caches['block']}, {setting(caches)}):\n\n"
        + table(
            ["tokens per step", "cache", "positions computed", "faster than none"],
            [
                [str(c["tokens_per_step"]), f"`{c['cache']}`", f"{c['computed']:,}",
                 f"{c['speedup']:.2f}×"]
                for c in known
            ],
        )
    )  # fmt: skip


def front(records: list[Record]) -> str:
    """The six settings that save most without being shown to lose accuracy."""
    tasks = list(dict.fromkeys(f"`{record.task}`" for record in records))
    plain = [record for record in records if record.cache == "none"]
    fastest = fastest_table(plain, most=6)
    others = [f"`{name}`" for name in sorted(measured_elsewhere()) if f"| `{name}" in fastest]
    machine = json.loads((RESULTS / SWEEP).read_text().splitlines()[0])["machine"]
    return (
        f"**Samplers** on `nano`, {records[0].examples} held-out prompts of each of "
        f"{', '.join(tasks)}: the six that save most, of those shown to lose at most 5 points "
        "against one token per step "
        f"([all {len({record.method for record in plain})}, and what this does not show]"
        "(docs/results/samplers.md#every-sampler-along-its-knob)):\n\n"
        + fastest
        + f"\n\nTimes: {machine['threads']} threads of an {machine['cpu']}"
        + (f"; of {', '.join(others)}: another, busy machine." if others else ".")
    )


def shown(records: list[Record]) -> list[str]:
    """The methods of the front table and what they are compared with: those with a panel."""
    plain = [record for record in records if record.cache == "none"]
    rows = fastest_table(plain, most=6).splitlines()[2:]
    methods = {record.sampler: record.method for record in plain}
    return [*(methods[row.split("`")[1]] for row in rows), COMMON, REFERENCE]


def head_row(case: dict[str, Any]) -> list[str]:
    memory = case["peak_extra_mib"]
    return [
        str(case["rows"]),
        f"{case['statistics_to_bare']['wall']:.2f}",
        f"{memory['statistics']:.0f} MB",
        f"{memory['float64_softmax']:.0f} MB",
    ]


def sweep() -> list[Record]:
    """The records of the committed sweep."""
    return list(Journal(RESULTS / SWEEP).records.values())


def samplers(records: list[Record]) -> str:
    """What ``dllm bench --preset readme`` found, and what that means."""
    line = json.loads((RESULTS / SWEEP).read_text().splitlines()[0])
    machine, minutes = line["machine"], sum(record.seconds for record in records) / 60
    plain = [record for record in records if record.cache == "none"]
    tasks = list(dict.fromkeys(f"`{record.task}`" for record in records))
    methods = len({record.method for record in plain})
    whole = [r.method for r in plain if "block_length" not in r.arguments]
    parts = [
        f"`dllm bench --preset readme` on `{line['model'].split('@')[0]}`: {methods} samplers, "
        f"each along its one knob, {records[0].examples} held-out prompts of each of "
        f"{', '.join(tasks)}; {machine['threads']} threads of an {machine['cpu']}, {minutes:.0f} "
        "minutes of decoding.",
        "![Accuracy of every sampler against tokens per forward](methods.svg)",
        "Each sampler before the others, all tasks together, with 95 % bands; [by task and against "
        "positions and seconds](pareto.svg).",
        "**Fastest setting** of each sampler, all tasks together, among those shown to lose at "
        "most 5 points against one token per step (lower end of the interval), and what it saves; "
        "p: exact McNemar test on the same prompts, adjusted for the number of rows (Holm):",
        fastest_table(plain),
        "Tokens per forward count an answer up to its end.  The masks behind the end are decided, "
        "too, unless a sampler stops before: that is why one token per step shows less than 1.",
        "**Caches**, against no cache under the same sampler, all tasks together, p as above:",
        cache_table(records),
        "What this shows: on a model that was trained for these tasks, how the rules of the "
        "samplers trade accuracy for forwards under equal conditions.  `sort` has one right "
        "answer, and there the model is sure and samplers hardly differ; the other two have "
        "several, and positions that are decided together may belong to different ones.  What it "
        "does not show: anything about 8B checkpoints, none of which was run here, or about long "
        f"answers.  They have at most {records[0].arguments.get('max_new_tokens', 0)} tokens, so "
        "caches have little to save.  Without blocks, and so with the whole canvas in view: "
        + ", ".join(f"`{method}`" for method in dict.fromkeys(whole))
        + "."
        + busy(machine)
        + elsewhere(),
    ]
    return "\n\n".join(parts)


def measured_elsewhere() -> set[str]:
    """Methods of the sweep that were measured on another machine than the first."""
    lines = [json.loads(line) for line in (RESULTS / SWEEP).read_text().splitlines()]
    first = lines[0]["machine"]["cpu"]
    return {line["method"] for line in lines if line["machine"]["cpu"] != first}


def elsewhere() -> str:
    """Whose times cannot be compared."""
    others = measured_elsewhere()
    if not others:
        return ""
    names = ", ".join(f"`{name}`" for name in sorted(others))
    return (
        f"  {names} were measured later, on another machine that was busy: their forwards and "
        "positions can be compared with the others', their times (faster, s) cannot."
    )


def areas(records: list[Record]) -> str:
    """The area under every curve of the sweep."""
    return (
        "Area under the curve of accuracy over tokens per forward (dense AUP, see "
        "[evaluation](../evaluation.md)) of `dllm bench --preset readme`; larger is "
        "better.  Bootstrap intervals; the third column compares draw by draw on the "
        "same prompts, and an interval with 0 in it "
        "is no ranking.\n\n" + area_table([record for record in records if record.cache == "none"])
    )


def busy(machine: dict[str, Any]) -> str:
    """A warning where other work ran beside the measurement; nothing is known of old results."""
    load = machine.get("load")
    if load is not None and load < machine["cores"] / 2:
        return ""
    return "  The machine was busy with other work: trust forwards and positions, not times."


def between(text: str, name: str, content: str) -> str:
    """``text`` with what stands between the markers of ``name`` replaced."""
    pattern = rf"(<!-- {name}:begin -->).*?(<!-- {name}:end -->)"
    new, count = re.subn(pattern, lambda m: f"{m[1]}\n{content}\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"markers of {name} not found")
    return new


def methods(result: dict[str, Any]) -> str:
    """Every method at its defaults against the baseline, on the same prompts."""
    every = {spec: entry["tasks"] for spec, entry in result["samplers"].items() if entry["tasks"]}
    base = {  # the tasks that most of them were measured on
        task: row
        for task, row in every[result["baseline"]].items()
        if sum(task in tasks for tasks in every.values()) > len(every) / 2
    }
    measured = {
        spec: here
        for spec, tasks in every.items()
        if (here := {task: row for task, row in tasks.items() if task in base})
    }
    differences = {
        spec: paired(*(np.concatenate([flags(of[t]) for t in tasks]) for of in (tasks, base)))
        for spec, tasks in measured.items()
    }
    adjusted = dict(zip(differences, holm([d.p_value for d in differences.values()]), strict=True))
    rows = []
    for spec, tasks in measured.items():
        ratios = {
            key: fmean(row[key] / base[t][key] for t, row in tasks.items())
            for key in ("nfe", "computed")
        }
        d, right = differences[spec], fmean(row["accuracy"] for row in tasks.values())
        rows.append(
            [f"`{spec}`", str(len(tasks)), f"{100 * right:.1f}",
             f"{100 * d.difference:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f})",
             f"{adjusted[spec]:.2g}", *(f"{ratio:.2f}×" for ratio in ratios.values())]
        )  # fmt: skip
    head = ["sampler", "tasks", "% right", f"points against `{result['baseline']}` (95 %)",
            "p (Holm)", "forwards", "positions"]  # fmt: skip
    note = (
        f"Every method at its paper's defaults on `nano`, "
        f"{next(iter(base.values()))['examples']} held-out prompts of each of {', '.join(base)}.  "
        "The last two columns are means over tasks of ratios to "
        f"`{result['baseline']}`; times were not taken side by side and are left out.\n\n"
    )
    missing = [f"`{spec}`" for spec, entry in result["samplers"].items() if not entry["tasks"]]
    if missing:
        note = note.rstrip("\n") + f"  Not measured here yet: {', '.join(missing)}.\n\n"
    return note + table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    records = sweep()
    parts = pages(ROOT / "docs") | {
        ROOT / "README.md": {"samplers": front(records), "caches": headline_caches()},
        ROOT / "docs" / "results" / "samplers.md": {
            "methods": methods(load("samplers")),
            "areas": areas(records),
            "sweep": samplers(records),
            "speed": speed(),
            "fast_dllm": official(load("fast_dllm")),
            "joining": joining(load("engine")),
        },
    }
    if not options.check:
        pareto(records, [ROOT / "docs" / "results" / "pareto.svg"])
        plot(load("cache_memory")["cases"], ROOT / "docs" / "reference" / "cache_memory.svg")
        multiples(records, [ROOT / "docs" / "results" / "methods.svg"])
        multiples(records, [ROOT / "docs" / "overview.svg"], shown(records), across=2)
    stale = []
    for path, contents in parts.items():
        old = new = path.read_text()
        for name, content in contents.items():
            new = between(new, name, content)
        if new != old:
            stale.append(path.name)
            if not options.check:
                path.write_text(new)
    if stale and options.check:
        sys.exit(f"not up to date: {', '.join(stale)}; run python benchmarks/readme.py")
    print("written: " + ", ".join(stale) if stale else "up to date")


if __name__ == "__main__":
    main()
