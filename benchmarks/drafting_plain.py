"""What the loop costs that drafting runs in: plain decoding against transformers' `generate`.

    python benchmarks/drafting_plain.py [--rows 1 64] [--tokens 64] [--repeats 7]

SmolLM2-135M-Instruct in bfloat16.  Ways take turns; each ratio is that of processor times in the
same turn, and the median over turns is shown with its quartiles.  Writes
``results/drafting_plain.json``; docs/reference/drafting.md shows it as a table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm

from harness import RESULTS, smollm2, untouched, write  # isort: skip

PROMPT = 40  # tokens


def ways(model: Any, tokens: int) -> dict[str, Callable[[list[list[int]]], Any]]:
    """Name -> what answers prompts of one length."""
    never = {"min_new_tokens": tokens, "max_new_tokens": tokens}

    raw = untouched(model)

    def transformers(attention: str) -> Callable[[list[list[int]]], Any]:
        def run(prompts: list[list[int]]) -> Any:
            raw.set_attn_implementation(attention)
            ids = torch.tensor(prompts)
            return raw.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **never)

        return run

    def ours(exact: bool) -> Callable[[list[list[int]]], Any]:
        def run(prompts: list[list[int]]) -> Any:
            given = [np.asarray(ids, np.int64) for ids in prompts]
            return dllm.speculate(
                model, None, given, exact=exact, max_batch_size=len(given), **never
            )

        return run

    return {
        "transformers sdpa": transformers("sdpa"), "transformers eager": transformers("eager"),
        "exact": ours(True), "exact=False": ours(False),
    }  # fmt: skip


def measure(model: Any, rows: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Processor seconds of every way, by turn."""
    rng = np.random.default_rng(rows)
    prompts = rng.integers(100, 40_000, (rows, PROMPT)).tolist()
    all_ways = ways(model, tokens)
    seconds: dict[str, list[float]] = {name: [] for name in all_ways}
    for turn in range(repeats + 1):
        for name, answer in all_ways.items():
            began = time.process_time()
            answer(prompts)
            if turn:  # the first one warms up
                seconds[name].append(time.process_time() - began)
    base = np.asarray(seconds["transformers sdpa"])
    ratios = {n: np.percentile(np.asarray(s) / base, [50, 25, 75]).tolist()
              for n, s in seconds.items()}  # fmt: skip
    return {"rows": rows, "seconds": seconds, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "drafting_plain.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = smollm2()
    model.hf.to(torch.bfloat16)
    model = dllm.load(model.hf, tokenizer=model.tokenizer)
    cells = []
    for rows in options.rows:
        cells.append(measure(model, rows, options.tokens, options.repeats))
        print(rows, {n: [round(x, 3) for x in r] for n, r in cells[-1]["ratios"].items()})
    settings = {"tokens": options.tokens, "threads": options.threads, "prompt": PROMPT}
    write(options.output, {**settings, "cells": cells})


if __name__ == "__main__":
    main()
