"""Compiled kernels beside PyTorch's on a CPU, in turns, in processor time.

    dllm doctor --compile
    python benchmarks/cpu_kernels.py

Products of some rows with weights (outputs × inputs) of each kind, in GFLOP/s; there are enough
weights that none is in the cache when its turn comes.  Attention of some queries over some keys,
nine heads of 64, in milliseconds, and the exact attention of verifiers, which sums over keys in
float64, of some texts with three heads.  Noise of whole vocabularies and of some ids, in
milliseconds.  ``--parts`` measures some of it, and the rest of the file
stays.
"""

from __future__ import annotations

import argparse
import json
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
from dllm.kernels.noise import torch as noise
from dllm.models.grouped import exact_rows

from harness import RESULTS, write  # isort: skip

SHAPES = ((1536, 576), (4096, 4096))
ROWS, KEYS, QUERIES = (1, 8, 32, 192), (192, 544, 2080, 4160), (1, 8, 32, 192)
BYTES = 64 << 20  # of weights that are multiplied one after the other
HEADS, SIZE = 9, 64
EXACT = ((16, 3, 50), (1, 3, 50), (1, 3, 1000), (1, 48, 300), (1, 48, 2000))  # texts, queries, keys
NOISE = ((1, 49152, None), (4, 49152, None), (8, 126464, None), (4, 49152, 64))  # rows, ids, some
Product = Callable[[torch.Tensor], torch.Tensor]


def weights_of(kind: str, w: torch.Tensor) -> tuple[Any, Any]:
    """The weight (outputs, inputs) as PyTorch's kernels read it, and as compiled ones do."""
    if kind in ("float32", "bfloat16"):
        w = w.to(getattr(torch, kind))
        return torch.ops.mkldnn._reorder_linear_weight(w), Weight(w)
    held = quantised.quantise(w.float(), 8 if kind == "int8" else 4, 64)
    if kind == "int8":
        return quantised.Int8(**held), Weight8(**held)
    return quantised.Int4(**held), Weight4(**held)


def products(kind: str, outputs: int, inputs: int) -> tuple[Product, Product]:
    """The same weight multiplied by PyTorch's kernels and by compiled ones."""
    theirs, ours = weights_of(kind, torch.randn(outputs, inputs))
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


def measure_exact(texts: int, queries: int, keys: int, rounds: int) -> dict[str, Any]:
    q, k, v = (torch.randn(texts, 3, count, SIZE).bfloat16() for count in (queries, keys, keys))
    seconds = in_turns({
        "PyTorch": lambda: [exact_rows(q, k, v, 0.1, None) for _ in range(9)],
        "compiled": lambda: [layers.attention(q, k, v, None, 0.1, exact=True) for _ in range(9)],
    }, rounds)  # fmt: skip
    found = {"texts": texts, "queries": queries, "keys": keys}
    found |= {n: s / 9 * 1e3 for n, s in seconds.items()}
    print(found, flush=True)
    return found


def chosen_noise(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`noise.gumbel_at` without compiled kernels."""
    words = noise._words(keys, ids >> 2).view(*ids.shape, 4)
    return noise.to_gumbel(words.gather(2, (ids & 3)[..., None])[..., 0])


def measure_noise(rows: int, vocabulary: int, some: int | None, rounds: int) -> dict[str, Any]:
    keys = torch.tensor([[1, 2, row, 3] for row in range(rows)])
    if some is None:
        kind, every = torch.float32, (0, vocabulary)
        works: dict[str, Callable[[], Any]] = {
            "PyTorch": lambda: noise._filled(keys, *every, kind, noise.to_gumbel),
            "compiled": lambda: noise.gumbel(keys, *every),
        }
    else:
        ids = torch.randint(0, vocabulary, (rows, some))
        works = {
            "PyTorch": lambda: chosen_noise(keys, ids),
            "compiled": lambda: noise.gumbel_at(keys, ids),
        }
    seconds = in_turns(works, 5 * rounds)
    found = {"rows": rows, "vocabulary": vocabulary, "ids": some}
    found |= {name: 1e3 * each for name, each in seconds.items()}
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["float32", "bfloat16", "int8", "int4"])
    parts = ["products", "attention", "exact", "noise"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu_kernels.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if library() is None:
        parser.error("there are no compiled kernels here: dllm doctor --compile")
    result = json.loads(options.output.read_text()) if options.output.exists() else {}
    with torch.inference_mode():
        if "products" in options.parts:
            result["products"] = [
                case for kind in options.kinds for shape in SHAPES
                for case in measure_products(kind, *shape, options.rounds)
            ]  # fmt: skip
        if "attention" in options.parts:
            result["attention"] = [
                measure_attention(m, n, options.rounds) for m in QUERIES for n in KEYS
            ]
        if "exact" in options.parts:
            result["exact"] = [measure_exact(*each, options.rounds) for each in EXACT]
        if "noise" in options.parts:
            result["noise"] = [measure_noise(*each, options.rounds) for each in NOISE]
    for name in ("machine", "kernels"):
        result.pop(name, None)
    write(options.output, result | {"threads": 1})


if __name__ == "__main__":
    main()
