"""Attention of few queries over many keys on a CPU: what the heads of a group save together.

    python benchmarks/attention.py               # writes results/attention.json
    python benchmarks/attention.py --keys 512 4096 --queries 1 8

Keys and values are a range of a larger buffer, as in decoding.  ``repeated``: transformers' way for
SDPA, heads that share keys named to the kernel; ``grouped``: `dllm.models.grouped`; ``products``:
batched matrix products with a plain softmax, for comparison, which round the scores to the dtype.
Microseconds of processor time, one thread, the ways in turns; ``error`` is the relative error
against float64.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from dllm.models.grouped import grouped

from report import RESULTS, write  # isort: skip

SHAPES = {"135M": (9, 9, 64), "LLaDA-8B": (32, 32, 128), "Dream-7B": (28, 4, 128)}
ROOM = 8192  # keys of the buffer


def ways(
    heads: int, kv: int, queries: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Any:
    """By name: attention (1, heads, queries, dh) of ``q`` over ``k``, ``v`` (1, kv, keys, dh)."""
    scale, size = q.shape[-1] ** -0.5, q.shape[-1]
    folded = q.reshape(1, kv, heads // kv * queries, size)

    def products() -> torch.Tensor:
        scores = torch.bmm(folded[0], k[0].transpose(1, 2)).mul_(scale)
        return torch.bmm(scores.softmax(-1), v[0])[None]

    return {
        "repeated": lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=heads != kv),
        "grouped": lambda: grouped(folded, k, v, scale, None, exact=False),
        "products": products,
    }


def measure(name: str, dtype: torch.dtype, queries: int, keys: int, rounds: int) -> dict[str, Any]:
    heads, kv, size = SHAPES[name]
    draw = torch.Generator().manual_seed(0)
    q = 2 * torch.randn(1, queries, heads, size, generator=draw).to(dtype).transpose(1, 2)
    k, v = (torch.randn(1, kv, ROOM, size, generator=draw).to(dtype)[:, :, 100 : 100 + keys]
            for _ in range(2))  # fmt: skip
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    found: dict[str, Any] = {}
    with torch.inference_mode():
        calls = ways(heads, kv, queries, q, k, v)
        taken: dict[str, list[float]] = {way: [] for way in calls}
        for way, call in calls.items():
            error = call().reshape(truth.shape).double() - truth
            found[f"{way}_error"] = float(error.norm() / truth.norm())
        for _ in range(rounds):
            for way, call in calls.items():
                began, times = time.process_time(), 0
                while time.process_time() - began < 2e-3:
                    call()
                    times += 1
                taken[way].append((time.process_time() - began) / times)
    return found | {way: 1e6 * median(each) for way, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--keys", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "attention.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for name in options.shapes:
        for dtype in options.dtypes:
            for queries in options.queries:
                for keys in options.keys:
                    case = {"shape": name, "dtype": dtype, "queries": queries, "keys": keys}
                    kind = getattr(torch, dtype)
                    case |= measure(name, kind, queries, keys, options.rounds)
                    print(case, flush=True)
                    cases.append(case)
    write(options.output, {"cases": cases})


if __name__ == "__main__":
    main()
