"""The experts of one layer on a CPU: compiled kernels beside PyTorch's and beside transformers.

    dllm doctor --compile
    python benchmarks/experts.py

64 experts of 384, eight per token, 768 wide; some tokens choose at random.  Processor time of one
thread, in turns, median of the rounds.  transformers' way is the grouped product that it takes on
CPUs by itself; it has none for rounded weights.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from dllm.kernels.cpu import library
from dllm.kernels.cpu.layers import Groups
from dllm.kernels.experts import apart, mixed
from dllm.kernels.linear import product

from cpu_kernels import in_turns, weights_of  # isort: skip
from harness import RESULTS, write  # isort: skip

EXPERTS, CHOSEN, WIDTH, INNER = 64, 8, 768, 384
TOKENS = (4, 32, 128)


def layer(dtype: torch.dtype) -> Qwen3MoeExperts:
    """transformers' own, with random weights."""
    made = Qwen3MoeExperts(Qwen3MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS,
        experts_implementation="grouped_mm",
    ))  # fmt: skip
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.03)
    return made.to(dtype).eval()


def measure(kind: str, rounds: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    theirs = layer(dtype)
    ways: dict[str, list[Any]] = {"PyTorch": [], "compiled": []}
    for stacked in (theirs.gate_up_proj, theirs.down_proj):
        packed, own = zip(*(weights_of(kind, w.detach()) for w in stacked), strict=True)
        ways["PyTorch"].append(
            partial(apart, times=lambda i, rows, packed=packed: product(rows, packed[i], None))
        )
        ways["compiled"].append(Groups(own))
    cases = []
    for tokens in TOKENS:
        x = torch.randn(tokens, WIDTH, dtype=dtype)
        weights, chosen = torch.rand(tokens, EXPERTS).topk(CHOSEN)
        weights = weights.to(dtype)
        works: dict[str, Any] = {
            name: partial(mixed, x, chosen, weights, theirs.act_fn, *way)
            for name, way in ways.items()
        }
        if kind in ("float32", "bfloat16"):
            works["transformers"] = partial(theirs, x, chosen, weights)
        found = {name: each * 1e3 for name, each in in_turns(works, rounds).items()}
        cases.append({"kind": kind, "tokens": tokens, **found})
        print(cases[-1], flush=True)
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=["float32", "bfloat16", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--output", type=Path, default=RESULTS / "experts.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if library() is None:
        parser.error("there are no compiled kernels here: dllm doctor --compile")
    with torch.inference_mode():
        cases = [case for kind in options.kinds for case in measure(kind, options.rounds)]
    write(options.output, {"threads": 1, "cases": cases})


if __name__ == "__main__":
    main()
