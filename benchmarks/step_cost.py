"""Time per step outside the transformer forward, as a share of the forward.

The forward (backbone plus bare head product, with the rows the engine gives them) is timed inside
whole generations, in processor time of one thread; what remains of a step is planning, packing,
statistics beyond the product, decisions and bookkeeping.

    python benchmarks/step_cost.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import dllm
from dllm.engine import forward

from report import RESULTS, write  # isort: skip
from shapes import llada_135m  # isort: skip


class Clock:
    """Times the parts of the forward inside the engine: the backbone, and the bare head product.

    The product is computed once more, beside the statistics that contain it; ``extra`` is what
    this measurement adds to a generation.
    """

    def __init__(self, model: dllm.DiffusionModel) -> None:
        self.backbone = self.head = self.extra = 0.0
        self.steps = 0
        self._forward, self._statistics = model.backbone.forward, forward.token_statistics

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        out = self._forward(*args, **kwargs)
        self.backbone += time.process_time() - start
        self.steps += 1
        return out

    def statistics(self, hidden: torch.Tensor, head: torch.nn.Module, **options: Any) -> Any:
        start = time.process_time()
        head(hidden)
        took = time.process_time() - start
        self.head, self.extra = self.head + took, self.extra + took
        return self._statistics(hidden, head, **options)


def measure(
    model: dllm.DiffusionModel, prompt: Any, repeats: int, **arguments: Any
) -> dict[str, float]:
    """Medians over generations: microseconds per step of backbone, head product and the rest."""
    rows: list[tuple[float, float, float]] = []
    for repeat in range(repeats + 1):  # the first is the warm-up
        clock = Clock(model)
        with (
            patch.object(model.backbone, "forward", clock.forward),
            patch.object(forward, "token_statistics", clock.statistics),
        ):
            start = time.process_time()
            dllm.generate(model, prompt, **arguments)
            total = time.process_time() - start - clock.extra
        rest = total - clock.backbone - clock.head
        if repeat:
            rows.append(tuple(1e6 * x / clock.steps for x in (clock.backbone, clock.head, rest)))  # type: ignore[arg-type]
    backbone, head, rest = (median(column) for column in zip(*rows, strict=True))
    share = rest / (backbone + head)
    return {"backbone_us": backbone, "head_us": head, "rest_us": rest, "rest_share": share}


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
        "nano": lambda: dllm.load("nano"), "135M": llada_135m,
    }  # fmt: skip
    for name, build in models.items():
        model = build()
        for cache in ("none", "dual"):
            for batch in (1, 16) if name == "nano" else (1,):
                arguments = {"sampler": "llada", "cache": cache, "max_new_tokens": 32,
                             "block_length": 32, "eos_policy": "none"}  # fmt: skip
                if name == "135M":
                    arguments |= {"steps": 8, "max_new_tokens": 64}
                prompt = ids if batch == 1 else [ids] * batch
                repeats = options.repeats if name == "nano" else max(3, options.repeats // 5)
                result = measure(model, prompt, repeats, **arguments)
                cases.append({"model": name, "cache": cache, "batch": batch, **result})
                print(f"{name:5} {cache:5} batch {batch}: " + ", ".join(
                    f"{key} {value:.3g}" for key, value in result.items()))  # fmt: skip
    write(options.output, {"threads": options.threads, "cases": cases})


if __name__ == "__main__":
    main()
