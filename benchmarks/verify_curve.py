"""What verifying k tokens costs: processor time of one forward, by dtype and kernels.

    python benchmarks/verify_curve.py [--context 192] [--repeats 9] [--threads 1]
    DLLM_KERNELS= python benchmarks/verify_curve.py   # PyTorch's kernels

The verifier is SmolLM2-135M-Instruct with the default attention; settings take turns, so that a
busy machine is unfair to all.  Writes ``results/verify_curve.json``, in which curves of the other
kernels stay; docs/drafting-reference.md shows it as a table.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import numpy as np
import torch

from dllm.drafting.base import chain
from dllm.drafting.verifiers.packed import open_verifier

from real import smollm2  # isort: skip
from report import RESULTS, kernels, write  # isort: skip

COUNTS = (1, 2, 4, 5, 8, 9, 12, 16, 17, 32)


def measure(context: int, repeats: int) -> dict[str, dict[int, float]]:
    """Milliseconds by setting and number of tokens, medians over turns."""
    rng, works = np.random.default_rng(0), {}
    for dtype in ("float32", "bfloat16"):
        model = smollm2()
        model.hf.to(getattr(torch, dtype))
        verifier = open_verifier(model)
        text = verifier.open(rng.integers(0, 40_000, context), context + 64)
        verifier.score([(text, chain([]))])
        verifier.commit(text, chain([]), [], [5])
        works[f"{dtype}, {kernels()} kernels"] = (verifier, text)
    seconds: dict[str, dict[int, list[float]]] = {n: {k: [] for k in COUNTS} for n in works}
    for _ in range(repeats):
        for name, (verifier, text) in works.items():
            for k in COUNTS:
                draft = chain(rng.integers(0, 40_000, k - 1))
                began = time.process_time()
                verifier.score([(text, draft)])
                seconds[name][k].append(time.process_time() - began)
    return {n: {k: 1e3 * median(v) for k, v in by.items()} for n, by in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = RESULTS / "verify_curve.json"
    known = json.loads(file.read_text())["processor_milliseconds"] if file.exists() else {}
    curves = known | measure(options.context, options.repeats)
    result: dict[str, Any] = {**vars(options), "processor_milliseconds": curves}
    write(file, result)


if __name__ == "__main__":
    main()
