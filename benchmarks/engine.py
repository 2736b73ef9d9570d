"""What it brings that rows join and leave: continuous against fixed batches, and rows of a batch.

    python benchmarks/engine.py       # all parts; --only batching, harness, rows or folding

``batching``  256 prompts of `nano` whose answers have 5 to 60 tokens: fixed batches of 8, 16 and 32
              (each ends with its longest answer) against continuous ones with as many rows
``harness``   the same prompts as requests of lm-evaluation-harness (extra ``eval``), 16 at a time
``rows``      1 to 16 ragged rows of the 135M shape against the same rows padded to the longest
``folding``   rows in lockstep whose slots lie at equal distances against slots after much coming
              and going, where attention takes them one by one

Processor time of one thread, runs of what is compared in turn; medians.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import dllm
from dllm import cache as caches
from dllm.core.canvas import Canvas
from dllm.engine import Engine, MaskedRecipe
from dllm.request.requests import answering, engine_for, recipe_for
from dllm.runtime.scheduler import Scheduler
from dllm.samplers import compose

from harness import RESULTS, llada_135m, write  # isort: skip

BATCHES = (8, 16, 32)


def ragged_prompts(count: int) -> list[str]:
    """Prompts whose answers differ in length: lists to copy, sums, and stories of two steps."""
    rng = np.random.default_rng(0)
    names = ["Tom", "Anna", "Ben", "Mia", "Zoe", "Max", "Eva", "Leo", "Ida", "Kim"]
    prompts = []
    for i in range(count):
        a, b, c = rng.integers(10, 90, 3)
        if i % 3 == 0:
            chosen = rng.permutation(names)[: rng.integers(2, 10)]
            prompts.append(f"Reverse this list: {', '.join(chosen)}")
        elif i % 3 == 1:
            prompts.append(f"Compute {a} + {b}.")
        else:
            prompts.append(
                f"Tom has {a} apples. Tom buys {b} more. Then Tom loses {min(c, a)}. "
                "How many apples does Tom have?"
            )
    return prompts


def answered(
    model: dllm.DiffusionModel, prompts: Sequence[str], rows: int, cache: str
) -> dict[str, Any]:
    """Answer prompts with at most ``rows`` at a time; what it took."""
    how = {"max_batch_size": rows, "max_new_tokens": 64, "block_length": 16}
    recipe = recipe_for(model, "threshold(tau=0.9)", None, how)
    began = time.process_time()
    requests = answering(model, recipe, prompts)
    engine = engine_for(model, caches.compose(cache, model.family.name), requests)
    scheduler = Scheduler.of(engine, requests)
    while scheduler.busy:
        scheduler.advance()
    seconds = time.process_time() - began
    results = [request.result for request in requests]
    return {
        "seconds": seconds,
        "forwards": scheduler.engine.forwards,
        "row_forwards": sum(result.nfe for result in results if result is not None),
        "tokens": [result.tokens for result in results if result is not None],
    }


def fixed(
    model: dllm.DiffusionModel, prompts: Sequence[str], rows: int, cache: str
) -> dict[str, Any]:
    """The same in batches that wait for their longest answer."""
    parts = [
        answered(model, prompts[i : i + rows], rows, cache) for i in range(0, len(prompts), rows)
    ]
    total = {name: sum(part[name] for part in parts) for name in ("seconds", "forwards")}
    row_forwards = sum(part["row_forwards"] for part in parts)
    tokens = [ids for part in parts for ids in part["tokens"]]
    return {**total, "row_forwards": row_forwards, "tokens": tokens}


def batching(repeats: int) -> list[dict[str, Any]]:
    model = dllm.load("nano")
    prompts = ragged_prompts(256)
    answered(model, prompts[:16], 16, "none")
    rows = []
    for cache, size in product(("none", "dual"), BATCHES):
        runs = [(fixed(model, prompts, size, cache), answered(model, prompts, size, cache))
                for _ in range(repeats)]  # fmt: skip
        one, other = runs[0]
        assert one["tokens"] == other["tokens"], "a batch equals its rows run alone"
        lengths = sorted(len(ids) for ids in one["tokens"])
        rows.append({
            "rows": size,
            "cache": cache,
            "answers": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
            "fixed_forwards": one["forwards"],
            "continuous_forwards": other["forwards"],
            "fixed_rows_per_forward": one["row_forwards"] / one["forwards"],
            "continuous_rows_per_forward": other["row_forwards"] / other["forwards"],
            "fixed_seconds": median(a["seconds"] for a, _ in runs),
            "continuous_seconds": median(b["seconds"] for _, b in runs),
            "faster": median(a["seconds"] / b["seconds"] for a, b in runs),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def harness(repeats: int) -> list[dict[str, Any]]:
    """`generate_until` with all requests in one call, against one call per 16 of them."""
    from lm_eval.api.instance import Instance

    from dllm.engine.forward import Forward
    from dllm.eval.harness import DLLM

    size = BATCHES[1]
    requests = [
        Instance("generate_until", {}, (prompt, {"until": ["\n"], "max_gen_toks": 64}), i)
        for i, prompt in enumerate(ragged_prompts(256))
    ]
    predict, forwards = Forward.predict, 0

    def counting(self: Forward, jobs: Any) -> Any:
        nonlocal forwards
        forwards += 1
        return predict(self, jobs)

    def run(pieces: Sequence[Sequence[Any]]) -> tuple[list[str], int, float]:
        nonlocal forwards
        model = DLLM("nano", sampler="threshold(tau=0.9)", batch_size=size)
        forwards, began = 0, time.process_time()
        texts = [text for piece in pieces for text in model.generate_until(piece, True)]
        return texts, forwards, time.process_time() - began

    with patch.object(Forward, "predict", counting):
        pieces = [requests[i : i + size] for i in range(0, len(requests), size)]
        runs = [(run(pieces), run([requests])) for _ in range(repeats)]
    one, other = runs[0]
    assert one[0] == other[0], "the harness gets the same texts"
    row = {
        "rows": size, "requests": len(requests),
        "fixed_forwards": one[1], "continuous_forwards": other[1],
        "faster": median(a[2] / b[2] for a, b in runs),
    }  # fmt: skip
    print(row, flush=True)
    return [row]


def steps_of(
    model: dllm.DiffusionModel, lengths: Sequence[int], masks: int, cache: str
) -> dict[str, Any]:
    """Decode a row per length, 4 tokens per step; processor time per forward, memory, positions."""
    mask = model.facts.mask_token_id
    assert mask is not None
    recipe = MaskedRecipe(
        compose("llada(steps=8)", options={"block_length": 32, "eos_policy": "none"})
    )

    canvases = [
        Canvas.for_prompt(np.arange(5, 5 + length), masks, mask_id=mask, pad_id=mask)
        for length in lengths
    ]
    engine = Engine(model, caches.compose(cache), slots=sum(len(c.tokens) for c in canvases))
    held = 0
    began = time.process_time()
    for _ in engine.run(canvases, recipe):
        held = max(held, engine.cache_bytes)
    seconds = time.process_time() - began
    return {
        "seconds": seconds,
        "forwards": engine.forwards,
        "computed": sum(canvas.computed for canvas in canvases),
        "tokens_per_second": len(canvases) * masks / seconds,
        "cache_bytes": held,
    }


def rows_of_a_batch(repeats: int) -> list[dict[str, Any]]:
    model, rng = llada_135m(), np.random.default_rng(1)
    lengths = rng.integers(32, 257, 16).tolist()
    rows = []
    for count in (1, 2, 4, 8, 16):
        own = lengths[:count]
        padded = [max(own)] * count
        runs = [(steps_of(model, own, 32, "dual"), steps_of(model, padded, 32, "dual"))
                for _ in range(repeats)]  # fmt: skip
        ragged, longest = runs[0]
        rows.append({
            "rows": count,
            "tokens_per_second": median(a["tokens_per_second"] for a, _ in runs),
            "computed": ragged["computed"], "computed_padded": longest["computed"],
            "cache_bytes": ragged["cache_bytes"], "cache_bytes_padded": longest["cache_bytes"],
            "faster": median(b["seconds"] / a["seconds"] for a, b in runs),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def lockstep(model: dllm.DiffusionModel, scattered: bool) -> float:
    """Processor seconds of 8 equal rows whose slots lie side by side, or with gaps of all sizes
    between them."""
    mask = model.facts.mask_token_id
    assert mask is not None
    recipe = MaskedRecipe(
        compose("llada(steps=8)", options={"block_length": 32, "eos_policy": "none"})
    )
    engine = Engine(model, caches.compose("dual"), slots=4096)
    engine.forward.allot(4096, 4096)
    buffer = engine.forward.buffer
    assert buffer is not None
    rows = []
    for i in range(8):
        if scattered:
            buffer.allocate(7 + 5 * (i % 3) + i)
        canvas = Canvas.for_prompt(np.arange(5, 133), 32, mask_id=mask, pad_id=mask)
        rows.append(engine.admit(canvas, recipe))
    began = time.process_time()
    while engine.live:
        engine.step()
    return time.process_time() - began


def folding(repeats: int) -> list[dict[str, Any]]:
    rows = []
    models: dict[str, Callable[[], dllm.DiffusionModel]] = {
        "nano": lambda: dllm.load("nano"), "135M": llada_135m,
    }  # fmt: skip
    for name, build in models.items():
        model = build()
        turns = repeats if name == "135M" else 5 * repeats
        pairs = [(lockstep(model, False), lockstep(model, True)) for _ in range(turns + 1)][1:]
        lost = median(b / a for a, b in pairs) - 1
        rows.append({"model": name, "rows": 8, "slower_when_scattered": lost})
        print(rows[-1], flush=True)
    return rows


PARTS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "batching": batching, "harness": harness, "rows": rows_of_a_batch, "folding": folding,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS / "engine.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: PARTS[name](options.repeats) for name in options.only or PARTS}
    write(options.output, {"threads": 1, **results})


if __name__ == "__main__":
    main()
