"""`adaptive` on prompts that are bad for drafting, against plain decoding.

    python benchmarks/never_slower.py [--verifier smollm2] [--drafter examples/smollm2-drafter]
        [--prompts gsm8k.jsonl ...] [--kinds "random words" ...] [--methods tree ...]

Three kinds: random words, languages that the verifier hardly knows, and ordinary questions at
temperature 1.5; every file of ``--prompts`` (Spec-Bench's form) is a kind, from ``--first`` on.
Every prompt is answered by every method in turn; processor time per token, prompt
included, of plain decoding divided by the method's: 1 is as fast, and the goal is 0.97.  Plain
decoding takes two turns, and their mean counts; ``plain again`` is the first over the second, that
is what the machine's noise makes of 1.  `adaptive` keeps what it learns from prompt to prompt, as
in a server; the first prompt of a call, on which it has nothing to go on, is shown apart.  A call
with some ``--kinds`` leaves what other calls with the same settings have measured.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.drafting.length.adaptive import Adaptive

from harness import RESULTS, load_verifier, write  # isort: skip

KINDS = ("random words", "another language", "temperature 1.5")

LANGUAGES = (
    "Kerro minulle, miksi taivas on sininen ja mistä sade tulee.",
    "Miért kék az ég, és honnan jön az eső? Magyarázd el röviden.",
    "Segðu mér hvers vegna himinninn er blár og hvaðan regnið kemur.",
    "Dlaczego niebo jest niebieskie i skąd bierze się deszcz?",
    "Proč je obloha modrá a odkud přichází déšť? Vysvětli to krátce.",
    "Kodėl dangus yra mėlynas ir iš kur ateina lietus?",
)  # fmt: skip
QUESTIONS = (
    "Why is the sky blue?", "Name three uses of a brick.", "How do I boil an egg?",
    "What is a prime number?", "Write two sentences about the sea.", "Who was Ada Lovelace?",
)  # fmt: skip


def prompts(kind: str, count: int, tokenizer: Any, first: int, files: list[Path]) -> list[str]:
    for file in files:
        if file.stem == kind:
            lines = file.read_text(encoding="utf-8").splitlines()[first : first + count]
            return [json.loads(line)["turns"][0] for line in lines]
    if kind == "another language":
        return list(LANGUAGES[:count])
    if kind == "temperature 1.5":
        return list(QUESTIONS[:count])
    rng = random.Random(0)
    return [tokenizer.decode([rng.randrange(100, len(tokenizer)) for _ in range(40)])
            for _ in range(count)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--verifier", default="smollm2")
    parser.add_argument("--drafter", default="examples/smollm2-drafter")
    parser.add_argument("--count", type=int, default=6, help="prompts of a kind")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--prompts", nargs="+", type=Path, default=[])
    parser.add_argument("--first", type=int, default=60, help="line that the prompts begin at")
    parser.add_argument("--methods", nargs="+", default=["tree", "lookup + tree", "suffix"])
    parser.add_argument("--output", type=Path, default=RESULTS / "never_slower.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_verifier(options.verifier)
    model = dllm.load(loaded.hf.to(torch.bfloat16), family="autoregressive",
                      tokenizer=loaded.tokenizer)  # fmt: skip
    tree = BlockDrafter(Path(options.drafter), head="tree")
    methods: dict[str, Any] = {
        "tree": tree, "lookup + tree": ["prompt_lookup", tree], "suffix": "suffix",
    }  # fmt: skip
    chosen = {name: methods[name] for name in options.methods}
    methods = {"plain": None, **chosen, "plain again": None}
    rates: dict[tuple[str, float], Adaptive] = defaultdict(Adaptive)  # as `adaptive` keeps them
    for method in methods.values():  # weights are packed when they are first used
        dllm.speculate(model, method, "warm up", max_new_tokens=4)
    settings = {name: str(value) for name, value in vars(options).items()
                if name not in ("kinds", "prompts", "output")}  # fmt: skip
    cases = measured(options.output, settings)
    for kind in [*(file.stem for file in options.prompts), *options.kinds]:
        temperature = 1.5 if kind == "temperature 1.5" else 0.0
        texts_of = prompts(kind, options.count, model.tokenizer, options.first, options.prompts)
        ratios: dict[str, list[float]] = {name: [] for name in methods}
        for i, prompt in enumerate(texts_of):
            seconds, texts = {}, {}
            order = list(methods)
            for name in order[i % len(order) :] + order[: i % len(order)]:
                began = time.process_time()
                result = dllm.speculate(
                    model, methods[name], prompt, max_new_tokens=options.tokens, seed=i,
                    temperature=temperature, controller=rates[name, temperature],
                )  # fmt: skip
                seconds[name] = (time.process_time() - began) / max(1, len(result.tokens))
                texts[name] = result.tokens
            assert all(text == texts["plain"] for text in texts.values()), (kind, i)
            plain = (seconds["plain"] + seconds["plain again"]) / 2
            for name in methods:
                over = seconds["plain"] if name == "plain again" else plain
                ratios[name].append(round(over / seconds[name], 3))
        cases[kind] = {
            name: {"texts": values, "mean": round(float(np.mean(values)), 3)}
            for name, values in ratios.items() if name != "plain"
        }  # fmt: skip
        print(kind, cases[kind], flush=True)
        write(options.output, {"settings": settings, "cases": cases})


def measured(output: Path, settings: dict[str, str]) -> dict[str, Any]:
    """What earlier calls with the same settings have measured."""
    known = json.loads(output.read_text(encoding="utf-8")) if output.exists() else {}
    return dict(known["cases"]) if known.get("settings") == settings else {}


if __name__ == "__main__":
    main()
