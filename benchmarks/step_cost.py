"""Time per step outside the transformer forward, as a share of the forward.

The forward (backbone plus head, as the engine calls it) is timed inside whole generations; what
remains of a step is planning, packing, statistics, decisions and bookkeeping.

    python benchmarks/step_cost.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dllm

from report import RESULTS, write  # isort: skip


class Clock:
    """Wraps the forward of a module and adds up its time."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.seconds, self.calls, self._forward = 0.0, 0, module.forward
        module.forward = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        out = self._forward(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return out


def shaped_135m() -> dllm.DiffusionModel:
    """A LLaDA-shaped model of about 135M parameters with random weights."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=9, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return dllm.load(LlamaForCausalLM(config), family="llada", mask_token_id=49151, eos_token_id=0)


def measure(model: dllm.DiffusionModel, prompt: Any, repeats: int, **arguments: Any) -> dict[str, Any]:
    """Medians over generations of the seconds per step, in and outside the forward."""
    clock = Clock(model.backbone)
    head_rows: list[int] = []
    try:
        dllm.generate(model, prompt, **arguments)  # warm-up
        inside, outside = [], []
        for _ in range(repeats):
            clock.seconds, clock.calls = 0.0, 0
            start = time.perf_counter()
            out = dllm.generate(model, prompt, **arguments)
            total = time.perf_counter() - start
            inside.append(clock.seconds / clock.calls)
            outside.append((total - clock.seconds) / clock.calls)
            head_rows.append(out.nfe)
    finally:
        del model.backbone.forward
    return {"forward_us": median(inside) * 1e6, "outside_us": median(outside) * 1e6}


def head_only(model: dllm.DiffusionModel, rows: int, repeats: int = 200) -> float:
    """Microseconds of the bare head product for that many rows: part of any forward."""
    hidden = torch.randn(rows, model.hf.config.hidden_size)
    times = []
    with torch.inference_mode():
        for _ in range(repeats):
            start = time.perf_counter()
            model.head(hidden)
            times.append(time.perf_counter() - start)
    return median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, default=RESULTS / "step_cost.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cases: list[dict[str, Any]] = []
    ids = list(range(40, 72))
    models: dict[str, Callable[[], dllm.DiffusionModel]] = {
        "nano": lambda: dllm.load("nano"), "135M": shaped_135m,
    }  # fmt: skip
    for name, build in models.items():
        model = build()
        for cache in ("none", "dual"):
            for batch in (1, 8) if name == "nano" else (1,):
                arguments = {"sampler": "llada", "cache": cache, "max_new_tokens": 32,
                             "block_length": 32, "eos_policy": "none"}  # fmt: skip
                if name == "135M":
                    arguments |= {"steps": 8, "max_new_tokens": 64}
                prompt = ids if batch == 1 else [ids] * batch
                repeats = options.repeats if name == "nano" else max(3, options.repeats // 5)
                found = measure(model, prompt, repeats, **arguments)
                head = head_only(model, 16 * batch)
                share = (found["outside_us"] - head) / (found["forward_us"] + head)
                cases.append({"model": name, "cache": cache, "batch": batch, "head_us": head,
                              **found, "overhead_share": share})  # fmt: skip
                print(f"{name:5} {cache:5} batch {batch}: forward {found['forward_us']:.0f} us + "
                      f"head {head:.0f} us, rest {found['outside_us'] - head:.0f} us "
                      f"= {share:.1%}")  # fmt: skip
    write(options.output, {"threads": options.threads, "cases": cases})


if __name__ == "__main__":
    main()
