"""What token statistics cost beside the bare head, and beside the softmax official loops use.

    python benchmarks/statistics_cost.py --heads llada --rows 32 256 768 --output kernels_llada.json
    python benchmarks/statistics_cost.py --quick

For every dtype and number of rows three things are timed, interleaved, on a head of the size of
LLaDA-8B's (4096 -> 126,464) or Dream-7B's (3584 -> 152,064) with random weights: the bare product
``hidden @ weight.T``; all default statistics; the product followed by a float64 softmax over all
rows, as the published sampling loops do.  Reported are medians and their ratios, of wall time and
of the processor time of the process; with one thread the latter leaves out what other programs
took.  Memory is the rise of the resident set's peak during one call in a process of its own
(Linux; elsewhere null).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from dllm.kernels.statistics import token_statistics

HEADS = {"llada": (4096, 126_464), "dream": (3584, 152_064)}
DTYPES = ("float32", "bfloat16")
Case = Callable[[torch.Tensor, torch.Tensor], object]


def bare(hidden: torch.Tensor, weight: torch.Tensor) -> object:
    return hidden @ weight.T


def ours(hidden: torch.Tensor, weight: torch.Tensor) -> object:
    return token_statistics(hidden, weight).numpy()


def official(hidden: torch.Tensor, weight: torch.Tensor) -> object:
    logits = hidden @ weight.T
    token = logits.argmax(-1, keepdim=True)
    return token, torch.softmax(logits.to(torch.float64), -1).gather(-1, token)


CASES: dict[str, Case] = {"bare": bare, "statistics": ours, "float64_softmax": official}


def head(name: str, dtype: str) -> torch.Tensor:
    """A random weight, filled in place so that making it leaves no higher peak behind."""
    hidden, vocabulary = HEADS[name]
    weight = torch.empty(vocabulary, hidden, dtype=getattr(torch, dtype))
    bound = (3 / hidden) ** 0.5
    return weight.uniform_(-bound, bound, generator=torch.Generator().manual_seed(0))


def inputs(rows: int, width: int, dtype: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (2 * torch.randn(rows, width, generator=generator)).to(getattr(torch, dtype))


def timings(weight: torch.Tensor, rows: int, dtype: str, repeats: int) -> dict[str, Any]:
    """Median times of each case, interleaved; one round to warm up is not counted."""
    hidden = inputs(rows, weight.shape[1], dtype)
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    spent: dict[str, dict[str, list[float]]] = {c: {n: [] for n in CASES} for c in clocks}
    for _ in range(repeats + 1):
        for name, case in CASES.items():
            start = {c: read() for c, read in clocks.items()}
            case(hidden, weight)
            for c, read in clocks.items():
                spent[c][name].append(read() - start[c])
    middle = {c: {n: median(v[1:]) for n, v in cases.items()} for c, cases in spent.items()}
    result: dict[str, Any] = {
        f"{c}_ms": {n: round(1e3 * v, 2) for n, v in cases.items()} for c, cases in middle.items()
    }
    for other in ("bare", "float64_softmax"):
        result[f"statistics_to_{other}"] = {
            c: round(cases["statistics"] / cases[other], 3) for c, cases in middle.items()
        }
    return result


def peak_rise(case: str, name: str, rows: int, dtype: str) -> float | None:
    """MiB by which one call raises the resident set above where it stood before; this process."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    weight, width = head(name, dtype), HEADS[name][0]
    hidden = inputs(rows, width, dtype)
    # what a first call loads is code, not working memory: run all of it on 1 MiB of logits before
    CASES[case](inputs(16, width, dtype), weight[:20_000])
    clear.write_text("5")  # the peak starts anew from the present resident set
    before = _kilobytes(status, "VmRSS")
    CASES[case](hidden, weight)
    return round((_kilobytes(status, "VmHWM") - before) / 1024, 1)


def _kilobytes(status: Path, field: str) -> int:
    lines = status.read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def memory(name: str, rows: int, dtype: str) -> dict[str, float | None]:
    """Peak rise of each case, each in a fresh process."""
    result = {}
    for case in CASES:
        command = [sys.executable, __file__, "--peak", case, "--rows", str(rows)]
        command += ["--heads", name, "--dtypes", dtype, "--threads", str(torch.get_num_threads())]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        result[case] = json.loads(done.stdout)
    return result


def machine() -> dict[str, Any]:
    """Processor and versions; nothing that names the computer."""
    model, info = platform.processor(), Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpu": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS))
    parser.add_argument("--quick", action="store_true", help="32 rows, three repeats")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256, 768])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peak", choices=list(CASES), help="measure the memory of one case")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.repeats = [32], 3
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    if arguments.peak:
        name, rows, dtype = arguments.heads[0], arguments.rows[0], arguments.dtypes[0]
        print(json.dumps(peak_rise(arguments.peak, name, rows, dtype)))
        return
    results = []
    for name, dtype in product(arguments.heads, arguments.dtypes):
        weight = head(name, dtype)
        timed = [timings(weight, rows, dtype, arguments.repeats) for rows in arguments.rows]
        del weight
        for rows, result in zip(arguments.rows, timed, strict=True):
            result["peak_extra_mib"] = memory(name, rows, dtype)
            results.append({"head": name, "dtype": dtype, "rows": rows, **result})
            print(json.dumps(results[-1]), flush=True)
    report = {
        "heads": {name: HEADS[name] for name in arguments.heads},
        "repeats": arguments.repeats,
        "machine": machine(),
        "results": results,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
