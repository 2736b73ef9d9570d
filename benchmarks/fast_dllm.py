"""Processor time beside released code: the same weights, prompts, steps and dtype, in turns.

    git clone https://github.com/NVlabs/Fast-dLLM
    python benchmarks/fast_dllm.py --code Fast-dLLM/llada
    python benchmarks/fast_dllm.py --code Fast-dLLM/llada --batch 8 --dtypes float32
    python benchmarks/fast_dllm.py --code Fast-dLLM/llada --loops window_diffusion dinfer \\
        --window-diffusion Window-Diffusion/llada --dinfer dInfer/python --steps 64

All decode the 135M shape (random weights): Fast-dLLM's loops in blocks of 32, without a cache, with
its prefix or its dual cache; Window-Diffusion's with the settings of its runs, one token per step;
dInfer's blockwise loop without a cache, where confidence 0.9 is seldom reached, so that it decides
about one token per step, too.  The latter two run on Fast-dLLM's network.  Released loops take
prompts of one length only: a ragged batch is decoded row by row there, in one call here.  Equal
commits are counted; in bfloat16 near ties are decided differently.  `int8` stands for weights of 8
bits here, and bfloat16 (float32 where the processor has none) in the released code.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
import types
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

import dllm
from dllm.models.precision import native_bfloat16
from dllm.models.quantisation import quantise, read

from harness import RESULTS, kernels, llada_135m, vectors, write  # isort: skip

BLOCK, MASK = 32, 49151
Loop = Callable[[Any, torch.Tensor, int, int], Any]  # network, ids (1, P), new, steps -> (1, L)
FAST_DLLM = {"none": "generate", "prefix": "generate_with_prefix_cache",
             "dual": "generate_with_dual_cache"}  # fmt: skip
OURS = {  # sampler and cache
    **{name: {"sampler": "llada(steps={steps})", "cache": name} for name in FAST_DLLM},
    "window_diffusion": {
        "sampler": "llada(steps={steps})",
        "cache": "window_diffusion(refresh_every=32, active=16, window=64)",
    },
    "dinfer": {"sampler": "threshold(tau=0.9)", "cache": "none"},
}


def fast_dllm(name: str) -> Loop:
    loop = getattr(importlib.import_module("generate"), FAST_DLLM[name])
    return lambda network, ids, new, steps: loop(
        network, ids, steps=steps, gen_length=new, block_length=BLOCK, mask_id=MASK
    )[0]


def window_diffusion(folder: Path) -> Loop:
    # loaded by its path: its package has the name of Fast-dLLM's
    spec = importlib.util.spec_from_file_location("wd", folder / "model" / "modeling_llada.py")
    assert spec is not None and spec.loader is not None
    sys.modules["wd"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda network, ids, new, steps: module.generate(
        network, ids, steps=steps, gen_length=new, mask_id=MASK,
        refresh_cycle=32, window_tokens=64, active_tokens=16,
    )  # fmt: skip


def dinfer(folder: Path) -> Loop:
    for package in ("dinfer", "dinfer.decoding"):  # without what these import for GPUs
        sys.modules[package] = module = types.ModuleType(package)
        module.__path__ = [str(folder / package.replace(".", "/"))]
    uniform, strategy, utils = (
        importlib.import_module(f"dinfer.decoding.{name}")
        for name in ("generate_uniform", "parallel_strategy", "utils")
    )
    decoder = strategy.ThresholdParallelDecoder(0, 0.9, mask_id=MASK, eos_id=-1)
    blocks = utils.BlockIteratorFactory(start_block_align=False)

    def loop(network: Any, ids: torch.Tensor, new: int, steps: int) -> Any:
        diffusion = uniform.BlockWiseDiffusionLLM(network, decoder, blocks, early_stop=False)
        return diffusion.generate(ids, gen_length=new, block_length=BLOCK)

    return loop


RELEASED = {"window_diffusion": window_diffusion, "dinfer": dinfer}


def official_network(folder: Path, dtype: torch.dtype, copy: bool = True) -> Any:
    """The official class with the weights of ``folder``; ``copy`` False: as they are mapped."""
    config = json.loads((folder / "config.json").read_text())
    for name in ("architectures", "model_type", "torch_dtype", "dtype"):
        config.pop(name, None)
    kind = importlib.import_module("model.modeling_llada").LLaDAModelLM
    settings = importlib.import_module("model.configuration_llada").LLaDAConfig(**config)
    settings.use_cache = False  # unless a loop asks for it
    settings.init_device = "cpu" if copy else "meta"
    if not hasattr(kind, "all_tied_weights_keys"):  # the class is older than transformers here
        kind.all_tied_weights_keys = {}
    with torch.device(settings.init_device):
        network = kind(settings)
    network.load_state_dict(load_file(folder / "model.safetensors"), assign=not copy)
    return network.to(dtype).eval()


class Both:
    """The two ways to decode the same prompts."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.options = options
        self.ours = llada_135m()
        half = torch.bfloat16 if native_bfloat16() else torch.float32
        dtype = half if name == "int8" else getattr(torch, name)
        self.ours.hf.to(dtype)  # type: ignore[arg-type]
        if options.cache == "dinfer":  # it takes what lies within 1e-5 of the most confident, too
            with torch.no_grad():
                self.ours.hf.model.norm.weight.mul_(6)
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
        self.loop = options.released[options.cache]
        self.forwards = {"official": 0, "dllm": 0}
        self.network.model.transformer.ln_f.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards["official"] += 1

    def official(self) -> list[list[int]]:
        rows = [
            self.loop(self.network, torch.tensor([ids]), self.options.new, self.options.steps)
            for ids in self.prompts
        ]
        return [row[0, len(ids) :].tolist() for row, ids in zip(rows, self.prompts, strict=True)]

    def dllm(self) -> list[list[int]]:
        steps, new = self.options.steps, self.options.new
        how = {name: part.format(steps=steps) for name, part in OURS[self.options.cache].items()}
        results = dllm.generate(
            self.ours, self.prompts, eos_policy="none", max_new_tokens=new,
            block_length=new if self.options.cache == "window_diffusion" else BLOCK, **how,
        )  # fmt: skip
        self.forwards["dllm"] += sum(result.nfe for result in results)
        return [list(result.tokens) for result in results]


def timed(function: Any) -> tuple[float, list[list[int]]]:
    began = time.process_time()
    result = function()
    return time.process_time() - began, result


def measure(both: Both, rounds: int) -> dict[str, Any]:
    """Ratios of processor time per forward, round by round; the first round is the warm-up."""
    times: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        theirs, texts = timed(both.official)
        ours, own = timed(both.dllm)
        times.append((theirs, ours))
    pairs = [pair for a, b in zip(texts, own, strict=True) for pair in zip(a, b, strict=True)]
    counts = {f"{name}_forwards": n // (rounds + 1) for name, n in both.forwards.items()}
    more = both.forwards["official"] / both.forwards["dllm"]
    ratios = [more * ours / theirs for theirs, ours in times[1:]]
    return counts | {
        "official_seconds": median(theirs for theirs, _ in times[1:]),
        "seconds": median(ours for _, ours in times[1:]),
        "ratio": median(ratios), "low": min(ratios), "high": max(ratios),
        "equal": sum(a == b for a, b in pairs) / len(pairs),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", type=Path, required=True, help="Fast-dLLM's, with generate.py")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--window-diffusion", type=Path, help="the folder with model/")
    parser.add_argument("--dinfer", type=Path, help="the folder with dinfer/")
    parser.add_argument("--loops", nargs="+", choices=list(OURS), default=["dual"])
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
    folders = {"window_diffusion": options.window_diffusion, "dinfer": options.dinfer}
    if missing := [name for name in options.loops if folders.get(name, options.code) is None]:
        parser.error(f"--{missing[0].replace('_', '-')} says where that code lies")
    options.released = {
        name: RELEASED[name](folders[name]) if name in RELEASED else fast_dllm(name)
        for name in options.loops
    }
    known = json.loads(options.output.read_text())["cases"] if options.output.exists() else []
    cases = product(options.loops, options.batch, options.prompt, options.dtypes)
    for cache, batch, prompt, dtype in cases:
        one = argparse.Namespace(
            **vars(options) | {"cache": cache, "batch": batch, "prompt": prompt}
        )
        case = {"dtype": dtype, "cache": cache, "batch": batch, "kernels": kernels()}
        case["vectors"] = vectors()
        case |= {name: getattr(one, name) for name in ("prompt", "new", "steps", "threads")}
        shape = dict(case)
        case |= measure(Both(dtype, one), options.rounds)
        print(", ".join(f"{name} {value}" for name, value in case.items()), flush=True)
        known = [each for each in known if not shape.items() <= each.items()] + [case]
        write(options.output, {"cases": known})


if __name__ == "__main__":
    main()
