"""Tokens per second of batches: plain and drafted, against transformers' padded batch.

    python benchmarks/throughput.py --batches 1 8 32 --drafters none prompt_lookup suffix
    python benchmarks/throughput.py --prompts throughput_1k.jsonl --count 64

The verifier is SmolLM2-135M-Instruct (``--verifier`` takes any other).  ``--prompts``: questions as
Spec-Bench has them, or the prepared throughput split of SPEED-Bench (arXiv 2604.09557), whose
buckets of input length are files and whose categories are low, mixed and high entropy; first
turns, tokenised here once, so that all settings get the same ids, ``--count`` of each category.
Without it, prompts of three kinds that stand below.  Settings take turns; seconds are those of the
processor.  Tokens count up to the end of the text.  Writes ``results/throughput.json``.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import dllm
from dllm.eval.speculation import read_questions
from dllm.request.prompts import encode

from harness import RESULTS, kernels, load_verifier, write  # isort: skip

THINGS = ("tea", "rain", "bees", "chess", "gold", "trains", "snow", "bread", "maps", "the moon",
          "salt", "roses", "rivers", "clocks", "glass", "cats")  # fmt: skip
KINDS = {
    "low": "Repeat three times: the {0} and the {1} went to the market to buy {2}.",
    "mixed": "List facts about {0} and {1}, one per line, as short sentences.",
    "high": "Write a surprising story in which {0} meets {1}.",
}


def own_prompts(count: int) -> list[tuple[str, str]]:
    """(prompt, category) pairs."""
    rows = []
    for i in range(count):
        kind = list(KINDS)[i % 3]
        names = (THINGS[i % 16], THINGS[(7 * i + 3) % 16], THINGS[(5 * i + 1) % 16])
        rows.append((KINDS[kind].format(*names), kind))
    return rows


def prompts_of(path: Path, count: int) -> list[tuple[str, str]]:
    """The first ``count`` of each category of a file, as (prompt, category)."""
    taken: Counter[str] = Counter()
    rows = []
    for question in read_questions(path):
        if taken[question.category] < count:
            taken[question.category] += 1
            rows.append((question.turns[0], question.category))
    return rows


def padded(model: Any, prompts: list[Any], new: int) -> int:
    """transformers' own batch: padded left, every row runs until the last has ended."""
    stop, longest = model.facts.eos_token_id, max(map(len, prompts))
    ids = torch.full((len(prompts), longest), stop)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = model.hf.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, pad_token_id=stop
    )
    ends = [(row == stop).nonzero() for row in out[:, longest:]]
    return sum(int(at[0]) + 1 if len(at) else out.shape[1] - longest for at in ends)


def run(model: Any, name: str, prompts: list[Any], new: int, batch: int) -> tuple[int, int]:
    """Tokens, and tokens that the verifier's forwards of single texts would have needed."""
    if name == "transformers":
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        tokens = sum(padded(model, group, new) for group in groups)
        return tokens, tokens
    drafter = None if name == "none" else name
    results = dllm.speculate(
        model, drafter, [p.tolist() for p in prompts], max_new_tokens=new, max_batch_size=batch
    )
    return sum(len(r.tokens) for r in results), sum(r.nfe for r in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=32, help="of a file: per category")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafters", nargs="+", default=["none", "prompt_lookup"])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_verifier(options.verifier)
    model.hf.to(getattr(torch, options.dtype))
    own = options.prompts is None
    rows = own_prompts(options.count) if own else prompts_of(options.prompts, options.count)
    encoded = [(encode(model, prompt), category) for prompt, category in rows]
    cells = []
    for batch in options.batches:
        for group in dict.fromkeys(group for _, group in encoded):
            prompts = [ids for ids, one in encoded if one == group]
            for name in ("transformers", *options.drafters):
                began = time.process_time()
                tokens, forwards = run(model, name, prompts, options.tokens, batch)
                seconds = time.process_time() - began
                cells.append({"batch": batch, "group": group, "setting": name, "tokens": tokens,
                              "forwards": forwards, "seconds": seconds})  # fmt: skip
                print(f"batch {batch:3d} {group:6s} {name:14s} {tokens / seconds:7.1f} tokens/s "
                      f"{tokens / forwards:.2f} per forward of a text", flush=True)  # fmt: skip
    settings = {k: v.name if isinstance(v, Path) else v for k, v in vars(options).items()}
    settings["group"] = "entropy" if own else "category"
    write(RESULTS / "throughput.json", {**settings, "kernels": kernels(), "cells": cells})


if __name__ == "__main__":
    main()
