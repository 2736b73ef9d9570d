"""What weights of 8 and 4 bits change in what a model says, and how many bytes they take.

    python benchmarks/quantised.py               # nano and SmolLM2; writes results/quantised.json
    python benchmarks/quantised.py --models nano --examples 8

`bits`: bits per token of held-out text.  Of `nano` a bound, from the same masks in every setting;
of SmolLM2 of README.md, which it was not trained on.  `equal`: share of greedy tokens that are
those of bfloat16, of `nano` in whole answers, of SmolLM2 at every position of the text.  `bytes`:
what the weights take.  Settings that are measured are replaced in results/quantised.json, others
stay; bfloat16 is always measured.
"""

from __future__ import annotations

import argparse
import json
from math import log
from pathlib import Path
from typing import Any

import torch

import dllm
from dllm.eval.tasks import TASKS

from harness import RESULTS, kernels, smollm2, write  # isort: skip

SETTINGS = (
    None, "int8", "int8(head=False)", "int8(embeddings=True)", "int4(group=32)", "int4(group=64)",
    "int4(group=128)", "int4(embeddings=True)",
)  # fmt: skip
README = Path(__file__).parents[1] / "README.md"


def held(model: Any) -> int:
    """Bytes of all weights, each once."""
    values = model.hf.state_dict().values()
    return sum({value.data_ptr(): value.nbytes for value in values}.values())


def nano(setting: str | None, count: int) -> tuple[float, list[int], int]:
    """Bits per token, greedy tokens and bytes."""
    model = dllm.load("nano", dtype="bfloat16", quantization=setting)
    size = held(model)
    bits, tokens, answers = 0.0, 0, []
    for task in TASKS.values():
        asked = task.examples(count)
        prompts = [example.prompt for example in asked]
        for score in dllm.score(model, prompts, [e.answer for e in asked], seed=1, samples=16):
            bits -= score.logprob / log(2)
            tokens += score.tokens
        for out in dllm.generate(model, prompts, max_new_tokens=32, block_length=32):
            answers += [*out.tokens, *[-1] * (32 - len(out.tokens))]
    return bits / tokens, answers, size


def smollm(setting: str | None, count: int) -> tuple[float, list[int], int]:
    """The same of SmolLM2 at every position of README.md, ``count`` pieces of 512 tokens."""
    network = smollm2()
    model = dllm.load(network.hf.to(torch.bfloat16), tokenizer=network.tokenizer,
                      quantization=setting)  # fmt: skip
    size = held(model)
    ids = torch.tensor(model.tokenizer(README.read_text())["input_ids"])[: 512 * count]
    bits, greedy = 0.0, []
    with torch.inference_mode():
        for piece in ids.split(512):
            logits = model.hf(piece[None]).logits[0, :-1].float()
            bits += float(torch.nn.functional.cross_entropy(logits, piece[1:], reduction="sum"))
            greedy += logits.argmax(-1).tolist()
    return bits / log(2) / len(greedy), greedy, size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["nano", "smollm2"])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--examples", type=int, default=4, help="per task, or pieces of text")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "quantised.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    known = json.loads(options.output.read_text())["cases"] if options.output.exists() else []
    cases = {(case["model"], case["setting"], case["kernels"]): case for case in known}
    for name in options.models:
        first: list[int] = []
        for setting in (None, *(given for given in options.settings if given)):
            bits, greedy, size = {"nano": nano, "smollm2": smollm}[name](setting, options.examples)
            first = first or greedy
            equal = sum(a == b for a, b in zip(greedy, first, strict=True)) / len(first)
            case = {"model": name, "setting": setting or "bfloat16", "kernels": kernels(),
                    "bits": bits, "equal": equal, "bytes": size, "tokens": len(greedy)}  # fmt: skip
            cases[name, case["setting"], case["kernels"]] = case
            print(json.dumps(case), flush=True)
            write(options.output, {"examples": options.examples, "cases": list(cases.values())})


if __name__ == "__main__":
    main()
