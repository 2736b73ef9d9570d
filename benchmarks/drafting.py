"""What drafting brings: accepted tokens, verifier forwards saved, wall time, per search and length.

    python benchmarks/drafting.py --quick
    python benchmarks/drafting.py --drafter runs/deer/stage2 --examples 50

Every run is compared with plain decoding by the same verifier on the same loop (``drafter=None``):
the share of identical outputs must be 1, the time ratio is plain seconds over drafted seconds.
``--prompts FILE`` (JSON lines with ``turns``, as Spec-Bench has them) replaces the generated tasks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm
from dllm.drafting.base import RoundStats
from dllm.drafting.result import conditional_acceptance, shares, survival
from dllm.eval.tasks import TASKS

from report import RESULTS, write  # isort: skip

SEARCHES = ("argmax", "cps", "cps(weight=1.0)", "best_of_k", "best_first_tree(nodes=16)")
SAMPLING = ("argmax", "coupled", "cps", "sample")
LENGTHS = (2, 4, 6, 8, 12, 16)
CONTROLLERS = ("adl", "adl_repaired", "confidence(tau=0.5)", "confidence_extend", "rate")
LOOKUPS = ("prompt_lookup", "anpd", "suffix", "token_recycling")


def prompts_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Task -> prompts."""
    if options.prompts is not None:
        lines = options.prompts.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line)["turns"][0] for line in lines[: options.examples]]
        return {options.prompts.stem: found}
    names = options.tasks or list(TASKS)
    return {n: [e.prompt for e in TASKS[n].examples(options.examples, 0)] for n in names}


def summary(rounds: list[RoundStats], tokens: int, seconds: float) -> dict[str, Any]:
    """Figures of many sequences, over all of their rounds."""
    accepted, drafted = sum(r.accepted for r in rounds), sum(r.drafted for r in rounds)
    return {
        "rounds": len(rounds),
        "tokens": tokens,
        "seconds": seconds,
        "accepted_per_round": accepted / len(rounds),
        "tokens_per_forward": tokens / len(rounds),
        "acceptance_rate": accepted / max(1, drafted),
        "survival": np.round(survival(rounds), 4).tolist(),
        "conditional_acceptance": np.nan_to_num(conditional_acceptance(rounds)).round(4).tolist(),
        "shares": {name: round(share, 4) for name, share in shares(rounds).items()},
    }


class Bench:
    """One verifier, its plain outputs, and everything compared with them."""

    def __init__(self, options: argparse.Namespace, verifier: Any, drafter: Any) -> None:
        self.options, self.verifier, self.drafter = options, verifier, drafter
        self.prompts = prompts_of(options)
        self.plain: dict[float, dict[str, list[Any]]] = {}
        for temperature in options.temperatures:
            self.run(None, temperature)  # the first forwards prepare libraries
            self.plain[temperature] = self.run(None, temperature)

    def run(self, drafter: Any, temperature: float, **how: Any) -> dict[str, list[Any]]:
        return {
            task: dllm.speculate(
                self.verifier, drafter, prompts, temperature=temperature,
                max_new_tokens=self.options.max_new_tokens, **how,
            )
            for task, prompts in self.prompts.items()
        }  # fmt: skip

    def compare(self, name: str, drafter: Any, temperature: float, **how: Any) -> dict[str, Any]:
        """Figures per task and over all."""
        found, plain = self.run(drafter, temperature, **how), self.plain[temperature]
        tasks = {task: self._entry(found[task], plain[task]) for task in found}
        everything = [r for rows in found.values() for r in rows]
        overall = self._entry(everything, [r for rows in plain.values() for r in rows])
        print(
            f"T={temperature} {name:42} {overall['accepted_per_round']:.2f} accepted  "
            f"{overall['forwards_saved']:.2f}x forwards  {overall['time_ratio']:.2f}x time  "
            f"identical {overall['identical']:.3f}",
            flush=True,
        )
        return {"temperature": temperature, "name": name, "overall": overall, "tasks": tasks}

    def _entry(self, found: list[Any], plain: list[Any]) -> dict[str, Any]:
        seconds = sum(r.seconds for r in found)
        entry = summary(
            [x for r in found for x in r.rounds], sum(len(r.tokens) for r in found), seconds
        )
        same = [a.tokens == b.tokens for a, b in zip(found, plain, strict=True)]
        return entry | {
            "identical": float(np.mean(same)),
            "forwards_saved": sum(r.nfe for r in plain) / sum(r.nfe for r in found),
            "time_ratio": sum(r.seconds for r in plain) / seconds,
        }


def part(options: argparse.Namespace, model: Any, search: str) -> Any:
    return dllm.DiffusionDrafter(model, search=search, window=options.window)


def experiments(bench: Bench, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Every searcher at one length, then every length and controller with the default searcher."""
    model = bench.drafter
    quick = options.quick
    k = "fixed(k=6)"
    for temperature in options.temperatures:
        for search in (SAMPLING if temperature else SEARCHES)[: 2 if quick else None]:
            how = {"rule": "ratio"} if search == "sample" else {}
            yield bench.compare(
                f"{search} {k}", part(options, model, search), temperature, controller=k, **how
            )
    for length in LENGTHS[1:4:2] if quick else LENGTHS:
        controller = f"fixed(k={length})"
        yield bench.compare(
            f"cps {controller}", part(options, model, "cps"), 0.0, controller=controller
        )
    for controller in ("rate",) if quick else CONTROLLERS:
        yield bench.compare(
            f"cps {controller}", part(options, model, "cps"), 0.0, controller=controller
        )
    for lookup in LOOKUPS[:1] if quick else LOOKUPS:
        yield bench.compare(lookup, lookup, 0.0, controller="whole")


def overlap(bench: Bench, rounds: int = 20) -> dict[str, float]:
    """Whether drafting beside verifying (PEARL, arXiv 2408.11850) can pay on this machine: seconds
    of a drafter and a verifier forward one after the other, and on two threads at once."""
    from concurrent.futures import ThreadPoolExecutor

    task = next(iter(bench.prompts))
    ids = torch.tensor([bench.plain[0.0][task][0].sequences.tolist()[:64]])

    def forward(model: Any) -> None:
        with torch.inference_mode():
            model.hf(input_ids=ids)

    models = (bench.drafter, bench.verifier)
    for model in models:
        forward(model)
    began = time.perf_counter()
    for _ in range(rounds):
        for model in models:
            forward(model)
    serial = (time.perf_counter() - began) / rounds
    with ThreadPoolExecutor(2) as pool:
        began = time.perf_counter()
        for _ in range(rounds):
            list(pool.map(forward, models))
        parallel = (time.perf_counter() - began) / rounds
    return {"serial_seconds": serial, "parallel_seconds": parallel}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verifier", default="nano-ar")
    parser.add_argument("--drafter", default="nano")
    parser.add_argument("--examples", type=int, default=20, help="prompts per task")
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--prompts", type=Path, help="JSON lines instead of tasks")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--lookups-only", action="store_true", help="no diffusion drafter")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few prompts and settings")
    parser.add_argument("--output", type=Path, default=RESULTS / "drafting.json")
    options = parser.parse_args()
    if options.quick:
        options.examples = min(options.examples, 2)
        options.tasks = options.tasks or ["copy", "reverse", "story1"]
    torch.set_num_threads(options.threads)
    verifier, drafter = dllm.load(options.verifier), dllm.load(options.drafter)
    bench = Bench(options, verifier, drafter)
    if options.lookups_only:
        found = [bench.compare(name, name, 0.0, controller="whole") for name in LOOKUPS]
    else:
        found = list(experiments(bench, options))
    result = {
        "verifier": verifier.name, "drafter": drafter.name, "examples": options.examples,
        "window": options.window, "threads": options.threads, "overlap": overlap(bench),
        "experiments": found,
    }  # fmt: skip
    write(options.output, result)


if __name__ == "__main__":
    main()
