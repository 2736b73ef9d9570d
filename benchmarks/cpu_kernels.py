"""Compiled kernels beside PyTorch's on a CPU, in turns, in processor time.

    dllm doctor --compile
    python benchmarks/cpu_kernels.py

Products of some rows with weights (outputs × inputs) of each kind, in GFLOP/s; there are enough
weights that none is in the cache when its turn comes.  Attention of some queries over some keys,
nine heads of 64, in milliseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from dllm.kernels import linear, quantised
from dllm.kernels.cpu import layers, library
from dllm.kernels.cpu.products import Weight, Weight4, Weight8

from report import RESULTS, write  # isort: skip

SHAPES = ((1536, 576), (4096, 4096))
ROWS, KEYS, QUERIES = (1, 8, 32, 192), (192, 544, 2080, 4160), (1, 8, 32, 192)
BYTES = 64 << 20  # of weights that are multiplied one after the other
HEADS, SIZE = 9, 64
Product = Callable[[torch.Tensor], torch.Tensor]


def products(kind: str, outputs: int, inputs: int) -> tuple[Product, Product]:
    """The same weight multiplied by PyTorch's kernels and by compiled ones."""
    w = torch.randn(outputs, inputs)
    if kind in ("float32", "bfloat16"):
        w = w.to(getattr(torch, kind))
        packed, own = torch.ops.mkldnn._reorder_linear_weight(w), Weight(w)
        return lambda x: linear.product(x, packed, None), lambda x: own.multiply(x, None)
    held = quantised.quantise(w, 8 if kind == "int8" else 4, 64)
    theirs, ours = (
        (quantised.Int8(**held), Weight8(**held)) if kind == "int8"
        else (quantised.Int4(**held), Weight4(**held))
    )  # fmt: skip
    return lambda x: linear.product(x, theirs, None), lambda x: linear.product(x, ours, None)


def in_turns(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            began = time.process_time()
            work()
            taken[name].append(time.process_time() - began)
    return {name: median(each[1:]) for name, each in taken.items()}


def one_by_one(weights: list[Product], x: torch.Tensor) -> None:
    for weight in weights:
        weight(x)


def measure_products(kind: str, outputs: int, inputs: int, rounds: int) -> list[dict[str, Any]]:
    count = max(2, BYTES // (outputs * inputs))
    pairs = [products(kind, outputs, inputs) for _ in range(count)]
    cases = []
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        x = x if kind == "float32" else x.bfloat16()
        works = [partial(one_by_one, [pair[i] for pair in pairs], x) for i in (0, 1)]
        seconds = in_turns(dict(zip(("PyTorch", "compiled"), works, strict=True)), rounds)
        work = 2e-9 * rows * outputs * inputs * count
        found = {name: work / each for name, each in seconds.items()}
        cases.append({"kind": kind, "outputs": outputs, "inputs": inputs, "rows": rows, **found})
        print(cases[-1], flush=True)
    return cases


def measure_attention(queries: int, keys: int, rounds: int) -> dict[str, Any]:
    q, k, v = (torch.randn(1, HEADS, count, SIZE).bfloat16() for count in (queries, keys, keys))
    seconds = in_turns({
        "PyTorch": lambda: [F.scaled_dot_product_attention(q, k, v, scale=0.1) for _ in range(9)],
        "compiled": lambda: [layers.attention(q, k, v, None, 0.1) for _ in range(9)],
    }, rounds)  # fmt: skip
    found = {"queries": queries, "keys": keys, **{n: s / 9 * 1e3 for n, s in seconds.items()}}
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["float32", "bfloat16", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu_kernels.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if library() is None:
        parser.error("there are no compiled kernels here: dllm doctor --compile")
    with torch.inference_mode():
        found = [
            case for kind in options.kinds for shape in SHAPES
            for case in measure_products(kind, *shape, options.rounds)
        ]  # fmt: skip
        attended = [measure_attention(m, n, options.rounds) for m in QUERIES for n in KEYS]
    write(options.output, {"threads": 1, "products": found, "attention": attended})


if __name__ == "__main__":
    main()
