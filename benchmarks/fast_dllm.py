"""Processor time beside Fast-dLLM's own code: the same weights, prompts, steps and dtype, in turns.

    git clone https://github.com/NVlabs/Fast-dLLM
    python benchmarks/fast_dllm.py --code Fast-dLLM/llada
    python benchmarks/fast_dllm.py --code Fast-dLLM/llada --batch 8 --dtypes float32

Both decode the 135M shape (random weights) with the dual cache, or another, in blocks of 32.  The
official loop takes prompts of one length only: a ragged batch is decoded row by row there, in one
call here.  Equal commits are counted; in bfloat16 near ties are decided differently.  `int8` stands
for weights of 8 bits here, and bfloat16 in the official code.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

import dllm
from dllm.models.quantisation import quantise, read

from report import RESULTS, kernels, write  # isort: skip
from shapes import llada_135m  # isort: skip

BLOCK, MASK = 32, 49151
LOOPS = {"none": "generate", "prefix": "generate_with_prefix_cache",
         "dual": "generate_with_dual_cache"}  # fmt: skip


def official_network(folder: Path, dtype: torch.dtype) -> Any:
    """The official class with the weights of ``folder``."""
    config = json.loads((folder / "config.json").read_text())
    for name in ("architectures", "model_type", "torch_dtype", "dtype"):
        config.pop(name, None)
    kind = importlib.import_module("model.modeling_llada").LLaDAModelLM
    settings = importlib.import_module("model.configuration_llada").LLaDAConfig(**config)
    settings.init_device, settings.use_cache = "cpu", False  # unless a loop asks for it
    if not hasattr(kind, "all_tied_weights_keys"):  # the class is older than transformers here
        kind.all_tied_weights_keys = {}
    network = kind(settings)
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.to(dtype).eval()


class Both:
    """The two ways to decode the same prompts."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.options = options
        self.ours = llada_135m()
        dtype = torch.bfloat16 if name == "int8" else getattr(torch, name)
        self.ours.hf.to(dtype)  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory() as folder:
            self.ours.save_pretrained(folder, layout="official")
            self.network = official_network(Path(folder), dtype)
        if name == "int8":
            quantise(self.ours.hf, read("int8"))
        draw = torch.Generator().manual_seed(0)
        self.prompts = [
            torch.randint(1, 49_000, (options.prompt + 7 * i,), generator=draw).tolist()
            for i in range(options.batch)
        ]
        self.loop = getattr(importlib.import_module("generate"), LOOPS[options.cache])

    def official(self) -> list[list[int]]:
        how = {"steps": self.options.steps, "gen_length": self.options.new, "block_length": BLOCK}
        rows = [
            self.loop(self.network, torch.tensor([ids]), mask_id=MASK, **how)[0]
            for ids in self.prompts
        ]
        return [row[0, len(ids) :].tolist() for row, ids in zip(rows, self.prompts, strict=True)]

    def dllm(self) -> list[list[int]]:
        results = dllm.generate(
            self.ours, self.prompts, sampler="llada", cache=self.options.cache, eos_policy="none",
            max_new_tokens=self.options.new, block_length=BLOCK, steps=self.options.steps,
        )  # fmt: skip
        return [list(result.tokens) for result in results]


def timed(function: Any) -> tuple[float, list[list[int]]]:
    began = time.process_time()
    result = function()
    return time.process_time() - began, result


def measure(both: Both, rounds: int) -> dict[str, Any]:
    """Ratios of processor time, round by round; the first round is the warm-up."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        theirs, texts = timed(both.official)
        ours, own = timed(both.dllm)
        times.append((theirs, ours))
    pairs = [pair for a, b in zip(texts, own, strict=True) for pair in zip(a, b, strict=True)]
    ratios = [ours / theirs for theirs, ours in times[1:]]
    return {
        "official_seconds": median(theirs for theirs, _ in times[1:]),
        "seconds": median(ours for _, ours in times[1:]),
        "ratio": median(ratios), "low": min(ratios), "high": max(ratios),
        "equal": sum(a == b for a, b in pairs) / len(pairs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", type=Path, required=True, help="the folder with generate.py")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--caches", nargs="+", choices=list(LOOPS), default=["dual"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt", type=int, nargs="+", default=[128],
                        help="tokens of the shortest prompt")  # fmt: skip
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "fast_dllm.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sys.path.insert(0, str(options.code))
    known = json.loads(options.output.read_text())["cases"] if options.output.exists() else []
    cases = product(options.caches, options.batch, options.prompt, options.dtypes)
    for cache, batch, prompt, dtype in cases:
        one = argparse.Namespace(
            **vars(options) | {"cache": cache, "batch": batch, "prompt": prompt}
        )
        case = {"dtype": dtype, "cache": cache, "batch": batch, "kernels": kernels()}
        case |= {name: getattr(one, name) for name in ("prompt", "new", "steps", "threads")}
        shape = dict(case)
        case |= measure(Both(dtype, one), options.rounds)
        print(", ".join(f"{name} {value}" for name, value in case.items()), flush=True)
        known = [each for each in known if not shape.items() <= each.items()] + [case]
        write(options.output, {"cases": known})


if __name__ == "__main__":
    main()
