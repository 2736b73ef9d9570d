"""`rate` on prompts that are bad for drafting, against plain decoding.

    python benchmarks/never_slower.py [--verifier smollm2] [--drafter examples/smollm2-drafter]

Three kinds: random words, languages that the verifier hardly knows, and ordinary questions at
temperature 1.5.  Every prompt is answered by every method in turn; processor time per token, prompt
included, of plain decoding divided by the method's: 1 is as fast, and the goal is 0.97.  `rate`
keeps what it learns from prompt to prompt, as in a server and, by its file, from call to call; the
first prompt of a kind, on which it may have nothing to go on, is shown apart.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dllm
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.drafting.length.rate import Rate

from real import load_verifier  # isort: skip
from report import RESULTS, write  # isort: skip

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


def prompts(kind: str, count: int, tokenizer: Any) -> list[str]:
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
    parser.add_argument("--count", type=int, default=4, help="prompts of a kind")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load_verifier(options.verifier)
    model = dllm.load(loaded.hf.to(torch.bfloat16), family="autoregressive",
                      tokenizer=loaded.tokenizer)  # fmt: skip
    tree = BlockDrafter(Path(options.drafter), head="tree")
    methods: dict[str, Any] = {
        "plain": None, "tree": tree, "lookup + tree": ["prompt_lookup", tree], "suffix": "suffix",
    }  # fmt: skip
    rates = {name: Rate() for name in methods}
    dllm.speculate(model, None, "warm up", max_new_tokens=4)
    cases: dict[str, Any] = {}
    for kind in ("random words", "another language", "temperature 1.5"):
        ratios: dict[str, list[float]] = {name: [] for name in methods}
        for i, prompt in enumerate(prompts(kind, options.count, model.tokenizer)):
            seconds, texts = {}, {}
            order = list(methods)
            for name in order[i % len(order) :] + order[: i % len(order)]:
                began = time.process_time()
                result = dllm.speculate(
                    model, methods[name], prompt, max_new_tokens=options.tokens, seed=i,
                    temperature=1.5 if kind == "temperature 1.5" else 0.0, controller=rates[name],
                )  # fmt: skip
                seconds[name] = (time.process_time() - began) / max(1, len(result.tokens))
                texts[name] = result.tokens
            assert all(text == texts["plain"] for text in texts.values()), (kind, i)
            for name in methods:
                ratios[name].append(seconds["plain"] / seconds[name])
        cases[kind] = {
            name: {
                "first": round(values[0], 3), "mean": round(float(np.mean(values)), 3),
                "rest": round(float(np.mean(values[1:])), 3),
                "least of the rest": round(min(values[1:]), 3),
            }
            for name, values in ratios.items() if name != "plain"
        }  # fmt: skip
        print(kind, cases[kind], flush=True)
        write(RESULTS / "never_slower.json", {"settings": vars(options), "cases": cases})


if __name__ == "__main__":
    main()
