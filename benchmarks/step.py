"""The time of a step against what the same machine can do; exit code 1 when a share has fallen.

    python benchmarks/step.py                       # measure, and write results/step.json
    DLLM_KERNELS= python benchmarks/step.py         # the same without compiled kernels
    python benchmarks/step.py --check               # measure, and compare with what stands there
    python benchmarks/step.py --rows 32 --dtypes bfloat16 --threads 1 --check
    python benchmarks/step.py --host                # microseconds of the host per row and step
    python benchmarks/step.py --bounds              # what bounds a step of an 8B model

A step of the 135M shape computes so many positions, which read 192 keys (or their own, if they are
more), and scores all of them: the backbone and the statistics, without the host's decisions
(`--host` has those).  Two things are measured beside it, in turns, in processor time:

``products``  the matrix products of the step and nothing else: every linear layer and the head, one
              after the other, on inputs of the right shape.  What is missing to 1 is attention,
              norms, rotation, activations, statistics.
``roof``      operations of the step over its time, against the largest product that fits the
              caches: what is missing is that, and how far products of few rows stay behind.

``--check`` fails where one of the shares is below `BOUND` times what was written, so that a slower
step is noticed on any machine whose results are at hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

import dllm
from dllm import cache as caches
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.engine import Engine, MaskedRecipe, forward
from dllm.engine.kv import KVBuffer
from dllm.eval.bounds import BLOCK, Device, step_of
from dllm.kernels.quantised import QuantisedLinear
from dllm.kernels.statistics import token_statistics
from dllm.models.footprint import Footprint
from dllm.models.forwards import CACHE
from dllm.models.quantisation import quantise, read
from dllm.models.segments import Segment
from dllm.samplers import compose

from harness import RESULTS, kernels, llada_135m, write  # isort: skip

ROWS, KEYS = (8, 32, 64, 192), 192
BOUND = 0.85
SHARES = {"products": "products", "roof": "roof"}


class Step:
    """The device half of a step of ``rows`` positions, and its bare products."""

    def __init__(self, model: dllm.DiffusionModel, rows: int, keys: int = KEYS) -> None:
        self.model, keys = model, max(rows, keys)
        config: Any = model.hf.config
        self.buffer = KVBuffer(config.num_hidden_layers, keys)
        self.buffer.slots = torch.arange(keys - rows, keys)
        ids = torch.randint(1, 49_000, (1, rows), generator=torch.Generator().manual_seed(rows))
        self.inputs = {
            "input_ids": ids,
            "position_ids": self.buffer.slots[None],
            "attention_mask": torch.empty(1, 1, 1, 1),
            CACHE: self.buffer,
            "use_cache": False,
            "segments": [Segment(slice(0, rows), slice(0, keys))],
        }
        layers = [
            m for m in model.backbone.modules() if isinstance(m, (nn.Linear, QuantisedLinear))
        ]
        self.layers = [*layers, model.head]
        sizes = [(layer.in_features, layer.out_features) for layer in self.layers]  # type: ignore[union-attr]
        self.x = {size: torch.randn(rows, size).to(model.dtype) for size, _ in sizes}  # type: ignore[call-overload]
        weights = sum(a * b for a, b in sizes)  # type: ignore[operator]
        attention = 2 * rows * keys * config.hidden_size * config.num_hidden_layers
        self.operations = 2 * (rows * weights + attention)

    def run(self) -> None:
        hidden = self.model.backbone(**self.inputs).last_hidden_state[0]
        token_statistics(hidden, self.model.head, needs=())

    def products(self) -> None:
        for layer in self.layers:
            layer(self.x[layer.in_features])  # type: ignore[index]


def roof(dtype: torch.dtype, int8: bool = False) -> Callable[[], None]:
    """A product of 1024 rows with a weight of 1024 x 1024, of 8 bits if ``int8``."""
    layer: nn.Module = nn.Linear(1024, 1024, bias=False).to(dtype)
    if int8:
        layer = QuantisedLinear.of(layer, 8)  # type: ignore[arg-type]
    else:
        dllm.kernels.linear.pack(layer)  # type: ignore[arg-type]
    x = torch.randn(1024, 1024).to(dtype)
    return lambda: layer(x)


ROOF = 2 * 1024**3  # operations of `roof`


HOST = [
    *((sampler, "dual", 32, late) for sampler in ("threshold", "localleap", "eb")
      for late in (False, True)),
    *((sampler, "none", 32, False) for sampler in ("threshold", "localleap", "eb")),
    ("threshold", "dual", 1, False), ("localleap", "dual", 1, False),
]  # fmt: skip


class Recorded:
    """A function whose results are kept in a first run and given again, in their order, in all
    others: the device's part of a step, which then costs the host nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.results, self.at = function, list[Any](), -1

    def __call__(self, *args: Any, **how: Any) -> Any:
        if self.at < 0:
            self.results.append(self.function(*args, **how))
            return self.results[-1]
        self.at += 1
        return self.results[self.at - 1]


def host_steps(
    model: Any, spec: str, cache: str, rows: int, late: bool,
    backbone: Recorded, statistics: Recorded,
) -> list[tuple[float, int]]:  # fmt: skip
    """Seconds and live rows of every step of ragged rows that decide few tokens a step; ``late``:
    four join per step, so that their blocks begin apart."""
    sampler = compose(spec, options={"block_length": 32, "eos_policy": "none"})
    recipe = MaskedRecipe(sampler, config=GenerationConfig())
    engine = Engine(model, caches.compose(cache), slots=rows * 200, max_batch_tokens=1 << 20)
    noise, facts = np.random.default_rng(0), model.facts
    waiting = [
        Canvas.for_prompt(noise.integers(5, 200, int(noise.integers(20, 120))), 64, row=row,
                          mask_id=facts.mask_token_id, pad_id=facts.eos_token_id)
        for row in range(rows)
    ]  # fmt: skip
    backbone.function, taken = engine.forward._backbone, list[tuple[float, int]]()
    with patch.object(engine.forward, "_backbone", backbone), \
         patch.object(forward, "token_statistics", statistics):  # fmt: skip
        while waiting or engine.live:
            for _ in range(min(len(waiting), 4 if late else rows)):
                engine.admit(waiting.pop(), recipe)
            began = time.process_time()
            count = len(engine.step())
            taken.append((time.process_time() - began, count))
    return taken


def host_time(model: Any, *case: Any, rounds: int) -> float:
    """Microseconds per live row and step: the shortest time of each step in ``rounds`` runs, so
    that what else the machine does counts little."""
    recorded = Recorded(print), Recorded(forward.token_statistics)
    host_steps(model, *case, *recorded)
    runs = []
    for _ in range(rounds):
        for one in recorded:
            one.at = 0
        runs.append(host_steps(model, *case, *recorded))
    shortest = [min(step)[0] for step in zip(*runs, strict=True)]
    return 1e6 * sum(shortest) / sum(count for _, count in runs[0])


def _unsure() -> Any:
    """nano, so unsure that a step decides few tokens."""
    model = dllm.load("nano")
    norm: Any = model.hf.model.norm
    norm.weight.data.mul_(0.2)
    torch.set_num_threads(1)
    return model


def host(rounds: int) -> None:
    """A line per case."""
    model = _unsure()
    for case in HOST:
        sampler, cache, rows, late = case
        taken = host_time(model, *case, rounds=rounds if rows > 1 else 8 * rounds)
        when = ", out of phase" if late else ""
        print(f"{sampler} {cache}, {rows} rows{when}: {taken:.0f} us", flush=True)


# LLaDA-8B in bfloat16, and an H100 SXM by its data sheet; a launch is assumed.
LAYERS, WIDTH, INNER, VOCABULARY = 32, 4096, 12_288, 126_464
H100 = Device(bandwidth=3.35e12, speed=989e12, launch=5e-6)


def bounds(rounds: int) -> str:
    """A table of steps of 1 to 128 rows with a dual cache; the host's share is measured."""
    model = _unsure()
    weights = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * INNER) + VOCABULARY * WIDTH
    needs = Footprint(weights, "bfloat16", 2 * weights, 1, 4 * LAYERS * WIDTH, layers=LAYERS,
                      read=weights, active=weights)  # fmt: skip
    lines = ["| rows | positions | GB | operations, 10^12 | launches | launched, ms | memory, ms "
             "| products, ms | host, ms | bound |", "|" + " --- |" * 10]  # fmt: skip
    for rows in (1, 8, 32, 128):
        step = step_of(needs, rows)
        times = step.seconds(H100)
        each = host_time(model, "threshold", "dual", rows, False, rounds=rounds)
        times["host"] = 1e-6 * rows * each
        milliseconds = " | ".join(f"{1e3 * taken:.1f}" for taken in times.values())
        most = max(times, key=lambda name: times[name])
        lines.append(
            f"| {rows} | {rows * BLOCK} | {step.moved / 1e9:.1f} | {step.operations / 1e12:.2f} "
            f"| {step.launches} | {milliseconds} | {most} |"
        )
    return "\n".join(lines)


def timed(function: Callable[[], Any], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - began) / times


def measure(step: Step, top: Callable[[], None], rounds: int, threads: int) -> dict[str, Any]:
    """Medians over rounds in which step, products and roof take turns."""
    taken: dict[str, list[float]] = {"step": [], "products": [], "roof": []}
    works = {"step": step.run, "products": step.products, "roof": top}
    with torch.inference_mode():
        for function in works.values():
            function()
        for _ in range(rounds):
            for name, function in works.items():
                taken[name].append(timed(function, 2) / threads)
    speed = [ROOF / seconds for seconds in taken["roof"]]
    shares = [p / s for p, s in zip(taken["products"], taken["step"], strict=True)]
    roofs = [step.operations / s / v for s, v in zip(taken["step"], speed, strict=True)]
    return {
        "milliseconds": 1e3 * median(taken["step"]),
        "roof_gflops": median(speed) / 1e9,
        "products": median(shares),
        "roof": median(roofs),
    }


def fallen(cases: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[str]:
    """One sentence for each share that is below `BOUND` times what it was."""
    known = {key(case): case for case in before}
    return [
        f"{case['dtype']}, {case['rows']} rows, {case['threads']} threads: {name} "
        f"{case[name]:.2f} of a step, {known[key(case)][name]:.2f} when it was written"
        for case in cases
        if key(case) in known
        for name in SHARES
        if case[name] < BOUND * known[key(case)][name]
    ]


def key(case: dict[str, Any]) -> tuple[Any, ...]:
    return case["dtype"], case["rows"], case["threads"], case["kernels"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULTS / "step.json")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--bounds", action="store_true")
    options = parser.parse_args()
    if options.host:
        host(options.rounds)
        return
    if options.bounds:
        print(bounds(options.rounds))
        return
    cases: list[dict[str, Any]] = []
    for name in options.dtypes:
        model = llada_135m()
        model.hf.to(torch.bfloat16 if name == "int8" else getattr(torch, name))  # type: ignore[arg-type]
        if name == "int8":
            quantise(model.hf, read("int8"))
        for threads in options.threads:
            torch.set_num_threads(threads)
            top = roof(model.dtype, name == "int8")
            for rows in options.rows:
                found = measure(Step(model, rows), top, options.rounds, threads)
                cases.append(
                    {"dtype": name, "threads": threads, "rows": rows, "kernels": kernels(), **found}
                )
                print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
                                for k, v in cases[-1].items()), flush=True)  # fmt: skip
    known = json.loads(options.output.read_text())["cases"] if options.output.exists() else []
    if not options.check:
        measured = {key(case) for case in cases}
        cases = [case for case in known if key(case) not in measured] + cases
        write(options.output, {"model": "135M", "keys": KEYS, "cases": cases})
        return
    problems = fallen(cases, known)
    print("\n".join(problems) or "no share has fallen")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
