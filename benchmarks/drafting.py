"""A block drafter on real prompts: tokens per forward, acceptance by place, processor time.

    python benchmarks/drafting.py counts --drafter examples/smollm2-drafter \\
        --prompts set/*.jsonl --answers runs/dflash/answers.jsonl
    python benchmarks/drafting.py times --count 2 --tokens 96 ...

``--prompts`` are files of JSON lines in Spec-Bench's form ("turns"); a file is a category.
``--answers`` adds two categories of prompts that the verifier gave itself, held out as in training:
those that it began itself, and those that began with given words (every second one).

``counts``: every method answers all prompts of a category in batches.  Tokens per forward of the
verifier do not depend on the machine, nor on the batch, beyond near-ties of bfloat16.
``times``: every prompt is answered by every method in turn, so that a slow minute of the machine
hits all of them; time per token against that of the fastest of the four plain decodings of a
category.  With one thread that is processor time, which a busy machine distorts less than the
clock; with several (``--threads``, into a file of its own) the clock, on a quiet machine.

What is done is kept: a stopped run goes on.  A method of ours in bfloat16 must write the tokens of
plain decoding in bfloat16; ``different`` counts the prompts where it did not.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, MuseGlimmerAssistantModel

import dllm
from dllm.drafting.dflash.drafter import BlockDrafter
from dllm.drafting.length.adaptive import Adaptive
from dllm.request.prompts import encode
from dllm.train.dflash.data import read_answers

from harness import RESULTS, smollm2, untouched, write  # isort: skip

PLACES = 8  # places of a draft whose acceptance is counted
PLAIN = ("plain", "plain float32", "transformers", "transformers float32")
COUNTED = (  # "merged": copies among the candidates; a number: nodes
    "prompt_lookup", "suffix", "no head", "chain", "tree", "lookup + chain", "lookup + tree",
    "merged chain", "merged tree", "merged tree 31", "lookup + merged tree 31",
)  # fmt: skip
TIMED = (  # "rate": sizes by the clock
    "prompt_lookup", "suffix", "tree", "tree rate", "lookup + tree", "lookup + tree rate",
    "merged tree rate", "lookup + chain rate", "transformers lookup", "transformers dflash",
)  # fmt: skip
Prompts = dict[str, list[list[int]]]


class Bench:
    """The verifier in the precisions that are asked for, and the methods by name."""

    def __init__(self, verifier: str, drafter: str, tokens: int) -> None:
        self.verifier, self.drafter, self.tokens = verifier, drafter, tokens
        self._models: dict[torch.dtype, Any] = {}
        self._untouched: dict[torch.dtype, Any] = {}  # as transformers runs them
        self._drafters: dict[str, Any] = {}
        self._rates: dict[str, Adaptive] = {}

    def model(self, dtype: torch.dtype = torch.bfloat16) -> Any:
        if dtype not in self._models:
            if self.verifier == "smollm2":
                loaded = smollm2()
                hf, tokenizer = loaded.hf.to(dtype), loaded.tokenizer
            else:
                hf = AutoModelForCausalLM.from_pretrained(self.verifier, dtype=dtype)
                tokenizer = AutoTokenizer.from_pretrained(self.verifier)
            self._models[dtype] = dllm.load(hf, tokenizer=tokenizer)
        return self._models[dtype]

    def drafter_of(self, method: str) -> Any:
        """What `dllm.speculate` takes for a method of ours."""
        if method in ("prompt_lookup", "suffix"):
            return method
        if method.startswith("plain"):
            return None
        kind = method.removeprefix("lookup + ").removesuffix(" rate")
        if kind not in self._drafters:
            name = kind.removeprefix("merged ")
            nodes = 31 if name.endswith("31") or method.endswith("rate") else 15
            self._drafters[kind] = BlockDrafter(
                self.drafter,
                head="none" if name == "no head" else name.split()[0],
                nodes=nodes,
                ngram_candidates=kind.startswith("merged"),
            )
        part = self._drafters[kind]
        return ["prompt_lookup", part] if method.startswith("lookup") else part

    def ours(self, method: str, prompts: list[list[int]], rows: int) -> list[Any]:
        """Results of `dllm.speculate`.  What `adaptive` learns stays from prompt to prompt, as in a
        server."""
        controller: Any = "full"
        if method.endswith(" rate"):
            controller = self._rates.setdefault(method, Adaptive())
        dtype = torch.float32 if method.endswith("float32") else torch.bfloat16
        results: list[Any] = dllm.speculate(
            self.model(dtype), self.drafter_of(method), prompts, max_new_tokens=self.tokens,
            controller=controller, max_batch_size=rows,
        )  # fmt: skip
        return results

    def theirs(self, method: str, ids: list[int]) -> tuple[list[int], int]:
        """Tokens and forwards of ``generate`` of transformers."""
        dtype = torch.float32 if method.endswith("float32") else torch.bfloat16
        if dtype not in self._untouched:
            self._untouched[dtype] = untouched(self.model(dtype))
        hf, calls, how = self._untouched[dtype], [], {}
        if method.endswith("lookup"):
            how = {"prompt_lookup_num_tokens": 8}
        if method.endswith("dflash"):
            if "native" not in self._drafters:
                native = MuseGlimmerAssistantModel.from_pretrained(self.drafter, dtype=dtype)
                self._drafters["native"] = native.eval()
            how = {"assistant_model": self._drafters["native"], "speculation_type": "dflash"}
        handle = hf.register_forward_hook(lambda *_: calls.append(1))
        given = torch.tensor([ids])
        out = hf.generate(given, attention_mask=torch.ones_like(given), do_sample=False,
                          max_new_tokens=self.tokens, **how)  # fmt: skip
        handle.remove()
        return out[0, len(ids) :].tolist(), len(calls)


def categories(arguments: Any, model: Any) -> Prompts:
    """Category -> ids of prompts, template included."""
    result: Prompts = {}
    for file in arguments.prompts:
        lines = file.read_text(encoding="utf-8").splitlines()[: arguments.count]
        texts = [json.loads(line)["turns"][0] for line in lines]
        result[file.stem] = [encode(model, text, True).tolist() for text in texts]
    if arguments.answers is not None:
        given = list(read_answers(arguments.answers))
        for first, name in enumerate(("own words", "given starts")):
            held = {a.ids[: a.start] for a in given[first::2] if a.held_out(arguments.held_out)}
            result[name] = [list(ids) for ids in sorted(held)[: arguments.count]]
    return result


def reached(rounds: list[Any]) -> list[int]:
    """Rounds with a draft, and how many of them accepted at least 1, 2, ... tokens."""
    drafted = [r for r in rounds if r.drafted]
    return [len(drafted), *(sum(r.accepted >= k for r in drafted) for k in range(1, PLACES + 1))]


def count(bench: Bench, method: str, prompts: list[list[int]], plain: list[Any]) -> dict[str, Any]:
    """Tokens and forwards of one method on one category."""
    row: dict[str, Any] = {"prompts": len(prompts)}
    if method.startswith("transformers"):
        pairs = [bench.theirs(method, ids) for ids in prompts]
        row["forwards"] = sum(forwards for _, forwards in pairs)
        texts = [tokens for tokens, _ in pairs]
    else:
        results = bench.ours(method, prompts, rows=8)
        row["forwards"] = sum(result.nfe for result in results)
        row["reached"] = reached([r for result in results for r in result.rounds])
        texts = [result.tokens for result in results]
    row["tokens"] = sum(map(len, texts))
    row["different"] = sum(a != b.tokens for a, b in zip(texts, plain, strict=True))
    return row


def run_counts(bench: Bench, prompts: Prompts, methods: list[str], output: Path, how: Any) -> None:
    """Category by category, method by method."""
    done = kept(output, how)
    for name, ids in prompts.items():
        rows = done.setdefault(name, {})
        missing = [method for method in methods if method not in rows and method not in PLAIN]
        plain = bench.ours("plain", ids, rows=16) if missing else []
        for method in missing:
            rows[method] = row = count(bench, method, ids, plain)
            print(f"{name} {method}: {row['tokens'] / row['forwards']:.2f} tokens per forward, "
                  f"{row['different']} of {row['prompts']} different", flush=True)  # fmt: skip
            write(output, {"settings": how, "categories": done})


def time_one(bench: Bench, method: str, ids: list[int]) -> tuple[list[int], dict[str, Any]]:
    """One answer: its tokens, and processor seconds, seconds, forwards."""
    began = time.process_time(), time.perf_counter()
    if method.startswith("transformers"):
        tokens, forwards = bench.theirs(method, ids)
        rounds: list[Any] = []
    else:
        (result,) = bench.ours(method, [ids], rows=1)
        tokens, forwards, rounds = result.tokens, result.nfe, result.rounds
    row: dict[str, Any] = {"cpu": time.process_time() - began[0],
                           "wall": time.perf_counter() - began[1]}  # fmt: skip
    row |= {"tokens": len(tokens), "forwards": forwards}
    if rounds:
        parts = [(r.draft_seconds, r.verify_seconds, r.other_seconds) for r in rounds]
        row["parts"] = [round(sum(column), 4) for column in zip(*parts, strict=True)]
    return tokens, row


def run_times(bench: Bench, prompts: Prompts, methods: list[str], output: Path, how: Any) -> None:
    """Prompt by prompt; its methods take turns, each time from another one on."""
    done = kept(output, how)
    pairs = [(name, i) for i in range(max(map(len, prompts.values()))) for name in prompts]
    for turn, (name, i) in enumerate(pairs):
        key = f"{name}/{i}"
        if key in done or i >= len(prompts[name]):
            continue
        ids, texts, rows = prompts[name][i], {}, {}
        first = turn % len(methods)
        if not done:  # the first answer of a method warms it up
            for method in methods:
                time_one(bench, method, ids[:64])
        for method in [*methods[first:], *methods[:first]]:
            texts[method], rows[method] = time_one(bench, method, ids)
        for method, tokens in texts.items():
            same = "plain float32" if method.endswith("float32") else "plain"
            rows[method]["different"] = int(tokens != texts.get(same, tokens))
        done[key] = rows
        print(key, {m: round(1e3 * r["cpu"] / r["tokens"], 1) for m, r in rows.items()}, flush=True)
        write(output, {"settings": how, "categories": done})


def kept(output: Path, how: Any) -> dict[str, Any]:
    """What an earlier start with the same settings has done."""
    if not output.exists():
        return {}
    known: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    if known["settings"] != how:
        raise SystemExit(f"{output} holds a run of other settings: move it away, or use --output")
    done: dict[str, Any] = known["categories"]
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("mode", choices=("counts", "times"))
    parser.add_argument("--verifier", default="smollm2")
    parser.add_argument("--drafter", default="examples/smollm2-drafter")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--held-out", type=int, default=64, help="one prompt in so many")
    parser.add_argument("--count", type=int, default=20, help="prompts per category")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--methods", nargs="*", choices=list({*PLAIN, *COUNTED, *TIMED}))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bench = Bench(arguments.verifier, arguments.drafter, arguments.tokens)
    prompts = categories(arguments, bench.model())
    how = {"count": arguments.count, "tokens": arguments.tokens, "threads": arguments.threads}
    if arguments.mode == "counts":
        output = arguments.output or RESULTS / "drafting_counts.json"
        run_counts(bench, prompts, arguments.methods or list(COUNTED), output, how)
    else:
        methods = list(dict.fromkeys([*PLAIN, *(arguments.methods or TIMED)]))
        suffix = "" if arguments.threads == 1 else f"_{arguments.threads}"
        output = arguments.output or RESULTS / f"drafting_times{suffix}.json"
        run_times(bench, prompts, methods, output, how)


if __name__ == "__main__":
    main()
