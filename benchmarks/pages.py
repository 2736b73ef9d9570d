"""Write what the documentation has of the code and of measurements.

    python benchmarks/pages.py            # pages of samplers, tables between markers, pictures
    python benchmarks/pages.py --check    # exit 1 where a page is not up to date

A page of a sampler is its docstring, its parameters, one line of `results/samplers.json` and a
picture of its order on one prompt.  A table stands between ``<!-- name:begin -->`` and
``<!-- name:end -->`` and is made of JSON that a benchmark wrote.  ``results/readme.jsonl`` is what
``dllm bench --preset readme`` wrote.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from dllm.cache import CACHES
from dllm.eval.measure import Record
from dllm.eval.metrics import holm, paired
from dllm.eval.plot import multiples, pareto
from dllm.eval.report import cache_table, fastest_table, markdown
from dllm.eval.sweep import Journal
from dllm.samplers import SAMPLERS

import dflash_tables as drafter  # isort: skip
from harness import RESULTS, conditions  # isort: skip
from sampler_pages import sampler_pages  # isort: skip
from samplers import flags  # isort: skip
from watched import watched  # isort: skip

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
Found = dict[str, Any]


@cache
def load(name: str) -> Found:
    result: Found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


@cache
def sweep() -> list[Record]:
    """The records of ``dllm bench --preset readme`` whose methods are still there."""
    records = Journal(RESULTS / "readme.jsonl").records.values()
    return [
        r for r in records
        if all(part in SAMPLERS for part in r.method.partition(" · ")[0].split("+"))
        and r.cache in CACHES
    ]  # fmt: skip


def plain() -> list[Record]:
    return [record for record in sweep() if record.cache == "none"]


FRONT = ("llada(steps=32)", "threshold(tau=0.9)", "localleap(tau_r=0.75)",
         "freedave(threshold(tau=0.9))")  # fmt: skip


def front() -> str:
    """Four settings of the sweep, all tasks together."""
    rows, seconds = [], list[float]()
    for name in FRONT:
        mine = [record for record in plain() if record.sampler == name]
        right, passes = (
            fmean(x for r in mine for x in getattr(r, field)) for field in ("right", "nfe")
        )
        tokens = fmean(x for r in mine for x in r.tokens)
        seconds.append(sum(record.seconds for record in mine))
        one = " (one token per step, padding included)" if name.startswith("llada") else ""
        rows.append(
            [f"`{name}`{one}", f"{100 * right:.1f} %", f"{passes:.1f}", f"{tokens / passes:.1f}",
             f"{seconds[0] / seconds[-1]:.1f}×"]
        )  # fmt: skip
    return markdown(
        ["sampler", "correct", "forward passes per answer", "tokens per forward pass", "faster"],
        rows,
    )


def defaults(most: int = 12) -> str:
    """Methods at their paper's defaults against the baseline, on the same prompts."""
    result = load("samplers")
    every = {
        spec: entry["tasks"] for spec, entry in result["samplers"].items()
        if entry["tasks"] and re.split(r"\W", spec)[0] in SAMPLERS and "+" not in spec
    }  # fmt: skip
    base = every[result["baseline"]]
    changes = {
        spec: paired(*(np.concatenate([flags(of[t]) for t in tasks]) for of in (tasks, base)))
        for spec, tasks in every.items()
    }
    adjusted = dict(zip(changes, holm([d.p_value for d in changes.values()]), strict=True))
    rows = []
    for spec, tasks in every.items():
        d, right = changes[spec], fmean(row["accuracy"] for row in tasks.values())
        passes = fmean(row["nfe"] / base[t]["nfe"] for t, row in tasks.items())
        rows.append((passes, [
            f"`{spec}`", f"{100 * right:.1f}",
            f"{100 * d.difference:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f})",
            f"{adjusted[spec]:.2g}", f"{passes:.2f}×",
        ]))  # fmt: skip
    rows.sort(key=lambda row: row[0])
    head = ["sampler", "% correct", f"points against `{result['baseline']}` (95 %)", "p (Holm)",
            "forward passes"]  # fmt: skip
    return markdown(head, [cells for _, cells in rows[:most]])


def cache_accuracy() -> str:
    """Caches under one sampler, on the sweep's tasks."""
    chosen = [r for r in sweep() if r.sampler == "threshold(tau=0.9)"]
    return cache_table(chosen)


def cache_costs(names: tuple[str, ...] = ()) -> str:
    """Positions and time of the caches on the shape that the README quotes."""
    found = load("caches")
    rows = [
        [f"`{c['cache']}`", f"{c['computed']:,}", f"{c['speedup']:.2f}×",
         f"{c['cache_bytes'] / 2**20:.0f} MiB"]
        for c in found["cases"]
        if c["cache"] in CACHES and (not names or c["cache"] in names)
    ]  # fmt: skip
    return markdown(["cache", "positions", "faster than `none`", "memory"], rows)


def official() -> str:
    """Processor time over that of official code."""
    named = {"window_diffusion": "Window-Diffusion", "dinfer": "dInfer, blockwise"}
    rows = [
        [case["vectors"], case["dtype"], named.get(case["cache"], f"`{case['cache']}`"),
         case["kernels"], str(case["batch"]), str(case["prompt"]),
         f"{case['ratio']:.2f} ({case['low']:.2f} to {case['high']:.2f})",
         f"{100 * case['equal']:.0f} %"]
        for case in load("fast_dllm")["cases"]
    ]  # fmt: skip
    head = ["vectors", "dtype", "loop", "kernels", "batch", "prompt",
            "time per forward pass, dllm / official", "equal commits"]  # fmt: skip
    return markdown(head, rows)


def steps() -> str:
    """A step's time, and how much of it is bare products."""
    rows = [
        [case["dtype"], str(case["rows"]), case["kernels"], f"{case['milliseconds']:.0f} ms",
         f"{100 * case['products']:.0f} %", f"{100 * case['roof']:.0f} %"]
        for case in sorted(load("step")["cases"], key=lambda case: (case["dtype"], case["rows"]))
        if case["rows"] in (8, 32, 192)
    ]  # fmt: skip
    head = ["dtype", "positions", "kernels", "a step", "of it products", "of the hardware limit"]
    return markdown(head, rows)


def heads() -> str:
    """Token statistics against the bare product of the head."""
    sizes = {"llada": "4096 × 126,464", "dream": "3584 × 152,064"}
    rows = [
        [sizes[case["head"]], case["dtype"], str(case["rows"]),
         f"{case['statistics_to_bare']['cpu']:.2f}",
         f"{case['peak_extra_mib']['statistics']:.0f} MiB",
         f"{case['peak_extra_mib']['float64_softmax']:.0f} MiB"]
        for name in ("kernels_llada", "kernels_dream") for case in load(name)["results"]
        if case["rows"] != 256
    ]  # fmt: skip
    head = ["head", "dtype", "positions", "CPU time / bare product", "extra memory",
            "of a float64 softmax"]  # fmt: skip
    return markdown(head, rows)


def compiled() -> str:
    """How many times as fast as PyTorch's kernels compiled ones multiply."""
    faster: dict[tuple[str, str], dict[int, float]] = {}
    for case in load("cpu_kernels")["products"]:
        weight = case["kind"], f"{case['outputs']} × {case['inputs']}"
        faster.setdefault(weight, {})[case["rows"]] = case["compiled"] / case["PyTorch"]
    rows = [[*weight, *(f"{each[n]:.1f}×" for n in (1, 32))] for weight, each in faster.items()]
    return markdown(["weights", "size", "1 position", "32 positions"], rows)


def experts() -> str:
    """The experts of a layer by compiled kernels, by PyTorch's and by transformers."""
    ways = ("compiled", "PyTorch", "transformers")
    rows = [
        [case["kind"],
         *(f"{case[way]:.1f} ms" if way in case else "–" for way in ways)]
        for case in load("experts")["cases"] if case["tokens"] == 32
    ]  # fmt: skip
    return markdown(["weights", "compiled", "PyTorch's kernels", "transformers"], rows)


def quantised() -> str:
    """What fewer bits change."""
    rows = [
        [case["model"], f"`{case['setting']}`", f"{case['bytes'] / 1e6:.0f} MB",
         f"{case['bits']:.3f}", f"{100 * case['equal']:.1f} %"]
        for case in load("quantised")["cases"]
        if (case["kernels"], case["model"]) == ("compiled", "smollm2")
    ]  # fmt: skip
    head = ["model", "weights", "size", "bits per token", "greedy tokens as in bfloat16"]
    return markdown(head, rows)


def llama() -> str:
    """Beside llama.cpp's llama-diffusion-cli."""
    found = load("llama_cpp")
    base = {case["type"]: case for case in found["cases"] if case["way"] == "llama.cpp"}
    rows = [
        [case["type"], case["way"], f"{case['busy'] / base[case['type']]['busy']:.2f}",
         f"{case['memory']:,.0f} MiB"]
        for case in found["cases"]
    ]  # fmt: skip
    head = ["weights", "program", "CPU time per forward pass / llama.cpp", "peak memory"]
    return markdown(head, rows)


def llama_text() -> str:
    """SmolLM2 beside llama.cpp, token by token."""
    rows = [
        [case["vectors"], case["type"], f"{1e3 * case['llama']:.1f} ms",
         f"{1e3 * case['dllm']:.1f} ms",
         f"{case['ratio']:.2f} ({case['low']:.2f} to {case['high']:.2f})"]
        for case in load("llama_text")["cases"]
    ]  # fmt: skip
    head = ["vectors", "weights", "llama.cpp, per token", "dllm", "dllm / llama.cpp"]
    return markdown(head, rows)


def memory() -> str:
    """The peak of a text beside official code."""
    cases = load("memory")["cases"]
    base = {case["dtype"]: case["peak"] for case in cases if case["who"] == "official"}
    rows = [
        [case["dtype"], case["who"], f"{case['peak']:,.0f} MB",
         f"{case['peak'] / base[case['dtype']]:.2f}"]
        for case in cases
    ]  # fmt: skip
    return markdown(["dtype", "program", "peak memory", "of official code"], rows)


def eight() -> str:
    """A network of LLaDA-8B's shape."""
    rows = [
        [f"`{case['way']}`", f"`{case['cache']}`", f"{case['memory']['peak']:.1f} GB",
         f"{case['tokens_per_second']:.2f}"]
        for case in load("eight_billion")["cases"]
    ]  # fmt: skip
    return markdown(["weights", "cache", "peak memory", "tokens per second"], rows)


def gpu_steps() -> str:
    """Steps of an 8B network on a GPU, with and without graphs."""
    found = load("gpu")
    released = {case["cache"]: f"{case['ms']:.1f}" for case in found["released"]}
    times = {(case["rows"], case["cache"], case["graphs"]): case for case in found["steps"]}
    rows = [
        [str(rows), f"`{cache}`", f"{case['computed']:,.0f}", f"{case['ms']:.1f}",
         f"{times[rows, cache, True]['ms']:.1f}", released[cache] if rows == 1 else ""]
        for (rows, cache, graphs), case in times.items() if not graphs
    ]  # fmt: skip
    return markdown(["rows", "cache", "positions", "ms", "with graphs", "Fast-dLLM"], rows)


def gpu_heads() -> str:
    """Statistics of an 8B head on a GPU."""
    names = "product", "statistics", "float64_softmax", "top_p", "top_p_of_flat_rows"
    rows = [
        [str(case["rows"]), *(f"{case[name]:.2f}" for name in names)]
        for case in load("gpu")["statistics"]
    ]
    head = ["positions", "bare product", "statistics", "float64 softmax", "top-p",
            "top-p, flat rows"]  # fmt: skip
    return markdown(head, rows)


def served(name: str) -> str:
    """Loads that are borne at equal p90 or p99, by mode."""
    found = load(name)
    modes = list(found["borne"][0]["loads"])
    rows = [
        [entry["what"], f"{entry['limit']:g}×",
         *("–" if load is None else f"{load:.2f}" for load in entry["loads"].values())]
        for entry in found["borne"]
    ]  # fmt: skip
    about = (
        f"`{found['model']}`, cache `{found['cache']}`, batch size {found['rows']}, "
        f"{found['requests']} requests per load, {conditions(found)}:\n\n"
    )
    return about + markdown(
        ["latency", f"{found['tail']} at most", *(f"`{m}`" for m in modes)], rows
    )


def structures() -> str:
    """What a step costs with each structure."""
    found = load("structured")
    rows = [
        [name, f"{case['states']:,}", f"{case['compile_seconds']:.2f} s",
         f"{case['likeliest_ms']:.1f} ms"]
        for name, case in found["structures"].items()
    ]  # fmt: skip
    for name, case in found["judged"].items():
        rows.append([f"{name}, judged", "", "", f"{case['p50_ms']:.1f} ms"])
    return markdown(["structure", "states", "compile", "step"], rows)


def schema_libraries() -> str:
    """Schemas that each library takes."""
    rows = [
        [name, f"{case['compile']} of {case['schemas']}", f"{case['p50_s']:.3f} s",
         f"{case['p90_s']:.2f} s", f"{case['max_s']:.2f} s",
         *(case[kind] if not case[kind].endswith(" of 0") else "–"
           for kind in ("invalid_accepted", "valid_refused"))]
        for name, case in load("structured")["schemas"].items()
    ]  # fmt: skip
    head = ["library", "compile", "median", "p90", "slowest", "invalid taken", "valid refused"]
    return markdown(head, rows)


# What was measured, its page, the command, and the file that the command wrote.
EVIDENCE = (
    ("accuracy and forward passes of samplers", "samplers", "dllm bench --preset readme",
     "readme.jsonl"),
    ("samplers, one by one", "samplers", "python benchmarks/samplers.py", "samplers.json"),
    ("positions and time of caches", "samplers", "python benchmarks/caches.py", "caches.json"),
    ("time beside official code", "cpu", "python benchmarks/fast_dllm.py", "fast_dllm.json"),
    ("time beside llama.cpp", "cpu", "python benchmarks/llama_cpp.py", "llama_cpp.json"),
    ("token by token beside llama.cpp", "cpu", "python benchmarks/llama_text.py --python PYTHON",
     "llama_text.json"),
    ("memory beside official code", "cpu", "python benchmarks/memory.py --code Fast-dLLM/llada",
     "memory.json"),
    ("memory and speed of an 8B shape", "cpu", "python benchmarks/eight_billion.py",
     "eight_billion.json"),
    ("tokens per forward pass of drafters", "drafting", "python benchmarks/drafting.py",
     "drafting_counts.json"),
    ("requests per second", "serving", "python benchmarks/serving.py", "serving.json"),
    ("steps on a GPU", "gpu", "python benchmarks/gpu.py --code Fast-dLLM/llada", "gpu.json"),
    ("a server under mixed load", "serving", "python benchmarks/soak.py", "soak.json"),
    ("structured output", "cpu", "python benchmarks/structured.py",
     "structured.json"),
)  # fmt: skip


def evidence() -> str:
    """Each measurement with its command and its last run."""
    rows = []
    for figure, page, command, file in EVIDENCE:
        text = (RESULTS / file).read_text(encoding="utf-8")
        machines = (
            [json.loads(line)["machine"] for line in text.splitlines()]
            if file.endswith("l")
            else [json.loads(text)["machine"]]
        )
        last = max(machines, key=lambda machine: machine["date"])
        where = last["gpu"] or f"{last['cpu']}, {last['vector']}"
        run = f"{last['date']}, {where}"
        rows.append([f"[{figure}]({page}.md)", f"`{command}`", run])
    return markdown(["figure", "command", "last run"], rows)


HEADLINE = ("none", "dual", "dkv", "window_diffusion")
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"samplers": front},
    "docs/choose-a-cache.md": {"caches": partial(cache_costs, HEADLINE)},
    "docs/results/samplers.md": {
        "defaults": defaults, "fastest": lambda: fastest_table(plain(), most=12),
        "caches": cache_accuracy, "costs": cache_costs,
    },
    "docs/results/index.md": {"evidence": evidence},
    "docs/results/cpu.md": {
        "official": official, "llama": llama, "text": llama_text, "memory": memory, "eight": eight,
        "quantised": quantised, "cost": structures, "libraries": schema_libraries,
    },
    "docs/results/gpu.md": {"steps": gpu_steps, "heads": gpu_heads},
    "docs/results/drafting.md": {
        "counts": lambda: drafter.counts(load("drafting_counts")),
        "times": lambda: drafter.times(load("drafting_times")),
    },
    "docs/results/serving.md": {"nano": partial(served, "serving"),
                                "135m": partial(served, "serving_135m_engine")},
    "docs/kernels.md": {"heads": heads, "steps": steps, "compiled": compiled,
                        "experts": experts},
}  # fmt: skip


def tables() -> Iterator[tuple[Path, str]]:
    """Every page with its tables made anew."""
    for file, made in TABLES.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        for name, table in made.items():
            pattern = rf"(<!-- {name}:begin -->).*?(<!-- {name}:end -->)"
            text, count = re.subn(
                pattern, lambda m, t=table: f"{m[1]}\n{t()}\n{m[2]}", text, flags=re.DOTALL
            )
            if count != 1:
                raise SystemExit(f"{file}: markers of {name} not found")
        yield ROOT / file, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pages = [*sampler_pages(load("samplers")), *tables(), (DOCS / "watch.svg", watched())]
    stale = [
        (path, text) for path, text in pages
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]  # fmt: skip
    if options.check:
        names = ", ".join(path.name for path, _ in stale)
        sys.exit(f"not up to date: {names}; run python benchmarks/pages.py" if stale else 0)
    for path, text in stale:
        path.write_text(text, encoding="utf-8")
    pareto(sweep(), [DOCS / "results" / "pareto.svg"])
    multiples(sweep(), [DOCS / "results" / "methods.svg"])
    shown = ["localleap", "freedave", "eb", "factor", "credit", "threshold", "llada"]
    multiples(sweep(), [DOCS / "overview.svg"], shown, across=2)
    print("written: " + ", ".join(path.name for path, _ in stale) if stale else "up to date")


if __name__ == "__main__":
    main()
