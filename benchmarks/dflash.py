"""A block drafter on real prompts: tokens per forward, acceptance by place, processor time.

    python benchmarks/dflash.py --verifier smollm2 --drafter examples/smollm2-drafter \\
        --prompts set/*.jsonl --answers runs/dflash/answers.jsonl

``--prompts`` are files of JSON lines in Spec-Bench's form ("turns"); a file is a category.
``--answers`` adds a category of prompts that the verifier gave itself, held out as in training.
Every prompt is answered by every method in turn, so that a slow minute of the machine hits all of
them; what is reported is processor time (all threads), which a busy machine distorts less than the
clock, as the sum over the prompts of a category over that of plain decoding.  A method in
bfloat16 must write the tokens of plain decoding in bfloat16, one in float32 those of float32;
``different`` counts the prompts where that failed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MuseGlimmerAssistantModel

import dllm
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.drafting.result import shares
from dllm.prompts import encode
from dllm.train.dflash.data import read_answers

from real import smollm2  # isort: skip
from report import RESULTS, write  # isort: skip

Answer = tuple[list[int], Any]  # tokens, and a SpeculativeResult or the number of forwards


def load(name: str, dtype: torch.dtype) -> Any:
    """A verifier with eager attention: rows then do not depend on how many there are."""
    if name == "smollm2":
        model = smollm2()
        model.hf.to(dtype)
        return dllm.load(model.hf, tokenizer=model.tokenizer)
    hf = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return dllm.load(hf, tokenizer=AutoTokenizer.from_pretrained(name))


def transformers_way(model: Any, tokens: int, **how: Any) -> Callable[[list[int]], Answer]:
    """``generate`` of transformers with ``how``."""

    def answer(ids: list[int]) -> Answer:
        calls: list[int] = []
        handle = model.hf.register_forward_hook(lambda *_: calls.append(1))
        given = torch.tensor([ids])
        out = model.hf.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=tokens,
            **how,
        )  # fmt: skip
        handle.remove()
        return out[0, len(ids) :].tolist(), len(calls)

    return answer


def our_way(model: Any, tokens: int, drafter: Any, **how: Any) -> Callable[[list[int]], Answer]:
    """`dllm.speculate` with ``how``."""

    def answer(ids: list[int]) -> Answer:
        result = dllm.speculate(model, drafter, ids, max_new_tokens=tokens, **how)
        return result.tokens, result

    return answer


def methods(
    models: dict[str, Any], drafter: str, tokens: int, chosen: list[str]
) -> dict[str, tuple[str, Callable[[list[int]], Answer]]]:
    """Name -> precision and how to answer."""
    low, full = models["bfloat16"], models["float32"]
    native = MuseGlimmerAssistantModel.from_pretrained(drafter, dtype=torch.bfloat16).eval()

    def block(**how: Any) -> BlockDrafter:
        return BlockDrafter(drafter, **how)

    tree, whole = "best_first_tree(nodes=15)", {"controller": "whole"}
    both = {
        "plain": ("bfloat16", our_way(low, tokens, None)),
        "plain float32": ("float32", our_way(full, tokens, None)),
        "plain transformers": ("bfloat16", transformers_way(low, tokens)),
        "plain transformers float32": ("float32", transformers_way(full, tokens)),
        "prompt_lookup": ("bfloat16", our_way(low, tokens, "prompt_lookup", **whole)),
        "suffix": ("bfloat16", our_way(low, tokens, "suffix", **whole)),
        "dflash argmax": ("bfloat16", our_way(low, tokens, block(head="none"), **whole)),
        "dflash walk": ("bfloat16", our_way(low, tokens, block(), **whole)),
        "dflash walk tree": ("bfloat16", our_way(low, tokens, block(head="tree"), **whole)),
        "dflash cps": ("bfloat16", our_way(low, tokens, block(search="cps"), **whole)),
        "dflash tree": ("bfloat16", our_way(low, tokens, block(search=tree), **whole)),
        "dflash rate": ("bfloat16", our_way(low, tokens, block())),
        "dflash walk float32": ("float32", our_way(full, tokens, block(), **whole)),
        "prompt_lookup+dflash tree": (
            "bfloat16", our_way(low, tokens, ["prompt_lookup", block(head="tree")], **whole)),
        "prompt_lookup+dflash": (
            "bfloat16", our_way(low, tokens, ["prompt_lookup", block()], **whole)),
        "transformers prompt lookup": (
            "bfloat16", transformers_way(low, tokens, prompt_lookup_num_tokens=8)),
        "transformers dflash": ("bfloat16", transformers_way(
            low, tokens, assistant_model=native, speculation_type="dflash")),
    }  # fmt: skip
    return {name: both[name] for name in chosen or both}


def categories(arguments: Any, model: Any) -> dict[str, list[list[int]]]:
    """Category -> ids of prompts, template included."""
    result = {}
    for file in arguments.prompts:
        lines = file.read_text(encoding="utf-8").splitlines()[arguments.skip :]
        texts = [json.loads(line)["turns"][0] for line in lines[: arguments.count]]
        result[file.stem] = [encode(model, text, True).tolist() for text in texts]
    for file in arguments.answers:
        held = {a.ids[: a.start] for a in read_answers(file) if a.held_out(arguments.held_out)}
        chosen = sorted(held)[: arguments.count]
        result[f"self-prompted {file.stem}"] = [list(ids) for ids in chosen]
    return result


def measure(
    prompts: list[list[int]], ways: dict[str, tuple[str, Callable[[list[int]], Answer]]]
) -> dict[str, Any]:
    """Sums over the prompts of one category."""
    rows: dict[str, dict[str, Any]] = {
        name: {"precision": precision, "tokens": 0, "forwards": 0, "cpu_seconds": 0.0,
               "seconds": 0.0, "different": 0}
        for name, (precision, _) in ways.items()
    }  # fmt: skip
    rounds: dict[str, list[Any]] = {name: [] for name in ways}
    for turn, ids in enumerate(prompts):
        order = list(ways)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        texts = {}
        for name in order:
            clocks = time.process_time(), time.perf_counter()
            tokens, more = ways[name][1](ids)
            row, texts[name] = rows[name], tokens
            row["cpu_seconds"] += time.process_time() - clocks[0]
            row["seconds"] += time.perf_counter() - clocks[1]
            row["tokens"] += len(tokens)
            row["forwards"] += more if isinstance(more, int) else more.nfe
            rounds[name] += [] if isinstance(more, int) else more.rounds
        for name, tokens in texts.items():
            reference = "plain" if ways[name][0] == "bfloat16" else "plain float32"
            rows[name]["different"] += tokens != texts.get(reference, tokens)
    for name, row in rows.items():
        row["tokens_per_forward"] = row["tokens"] / row["forwards"]
        if rounds[name]:
            drafted = [r for r in rounds[name] if r.drafted]
            row["accepted_by_place"] = [
                float(np.mean([r.accepted >= k for r in drafted])) for k in range(1, 8)
            ] if drafted else []  # fmt: skip
            row["shares"] = shares(rounds[name])
    for row in rows.values():
        for plain in ("plain", "plain float32"):
            if plain in rows:
                per_token = rows[plain]["cpu_seconds"] / rows[plain]["tokens"]
                own = row["cpu_seconds"] / row["tokens"]
                row[f"speed over {plain}"] = per_token / own
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--verifier", default="smollm2")
    parser.add_argument("--drafter", default="examples/smollm2-drafter")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--answers", type=Path, nargs="*", default=[])
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--count", type=int, default=20, help="prompts per category")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--output", type=Path, default=RESULTS / "dflash.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    models = {str(dtype).split(".")[-1]: load(arguments.verifier, dtype)
              for dtype in (torch.bfloat16, torch.float32)}  # fmt: skip
    ways = methods(models, arguments.drafter, arguments.tokens, arguments.methods)
    result: dict[str, Any] = {}
    for name, prompts in categories(arguments, models["bfloat16"]).items():
        result[name] = measure(prompts, ways)
        print(f"{name}: {len(prompts)} prompts")
        for way, row in result[name].items():
            speeds = " ".join(f"{v:.2f}" for k, v in row.items() if k.startswith("speed"))
            print(f"  {way:28s} {row['tokens_per_forward']:.2f} tokens per forward, "
                  f"{speeds} times plain, {row['different']} different", flush=True)  # fmt: skip
        settings = {"count": arguments.count, "tokens": arguments.tokens,
                    "threads": arguments.threads, "load": "shared machine"}  # fmt: skip
        write(arguments.output, {"settings": settings, "categories": result})


if __name__ == "__main__":
    main()
