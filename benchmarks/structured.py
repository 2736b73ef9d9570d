"""What answers with a form cost, and what they give.

    python benchmarks/structured.py --output structured.json

Per format: seconds to compile it, states, classes and edges over the vocabulary of ``--tokens`` (a
folder or hub id of a tokenizer; default the bundled model's), and the processor time of one step on
the host, for a window of 32 undecided positions with random predictions: the likeliest completion,
or a drawn one, with its marginals; also with half of the window decided, as in the middle of an
answer, and per row where eight rows have the format.  On the device: token statistics of 32 rows
with classes beside those without, on a head of 135M's shape (576 -> 49,152).  With the bundled
model: processor time of decoding with and without a form, and the share of right answers on
additions, paired; forwards and right answers with `literals` beside those without, where the answer
is in a JSON object.  Times are medians; the share of a step at 8B is that of a step of 15 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import dllm
from dllm.kernels.statistics import TokenClasses, token_statistics
from dllm.structured import source
from dllm.structured.automaton import Automaton
from dllm.structured.joint import Chain, Lattice
from dllm.structured.vocabulary import Vocabulary, vocabulary_of
from dllm.structured.worker import Worker

WINDOW, STEP_8B = 32, 15.0  # positions, milliseconds
PERSON = {
    "type": "object", "required": ["name", "age", "tags"],
    "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
}  # fmt: skip
FORMATS = {
    "date": source.regex(r"\d{4}-\d{2}-\d{2}"),
    "email": source.regex(r"[a-z0-9._]+@[a-z0-9]+(\.[a-z]{2,4})+"),
    "choice of 3": source.choice(["yes", "no", "unsure"]),
    "50 letters and blanks": source.regex('"[a-zA-Z ]{0,50}"'),
    "object of 4": source.json_schema(PERSON),
    "any JSON, depth 3": source.json_schema({"type": "object"}),
}


def seconds(task: Callable[[], object], times: int = 7) -> float:
    """Median processor time of a call."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        task()
        taken.append(time.process_time() - began)
    return median(taken)


def host(worker: Worker, vocabulary: Vocabulary, wanted: source.Source) -> dict[str, Any]:
    """What one format costs before and in a step."""
    began = time.perf_counter()
    tables = worker.compile(wanted, vocabulary)
    compiling = time.perf_counter() - began
    size = len(vocabulary.pieces) + 1
    automaton = Automaton.ending(tables, [size - 1], size - 1, size)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(WINDOW, automaton.next.shape[1])) * 3
    final = (automaton.accepting | automaton.closed) | (automaton.need <= 64)
    chain = Chain(weight, weight, tables.start, final)
    noise, middle = rng.random(WINDOW), Lattice(automaton, [chain]).likeliest(chain)
    state = tables.start
    for label in middle[: WINDOW // 2].tolist():
        state = int(automaton.next[state, label])
    half = Chain(weight[WINDOW // 2 :], weight[WINDOW // 2 :], state, final)

    def likeliest(*chains: Chain) -> None:
        lattice = Lattice(automaton, chains)
        for each in chains:
            lattice.marginals(each, lattice.likeliest(each))

    def drawn() -> None:
        lattice = Lattice(automaton, [chain])
        lattice.marginals(chain, lattice.drawn(chain, noise))

    result = {
        "compile_seconds": compiling, "states": len(automaton.accepting),
        "classes": automaton.next.shape[1], "edges": int((automaton.next >= 0).sum()),
        "likeliest_ms": 1e3 * seconds(lambda: likeliest(chain)), "drawn_ms": 1e3 * seconds(drawn),
        "half_decided_ms": 1e3 * seconds(lambda: likeliest(half)),
        "one_of_8_rows_ms": 1e3 / 8 * seconds(lambda: likeliest(*map(copy, [chain] * 8))),
    }  # fmt: skip
    return {**result, "share_of_15_ms": result["likeliest_ms"] / STEP_8B}


def device(rows: int = 32, depth: int = 576, size: int = 49_152, classes: int = 120) -> Any:
    """Statistics with classes beside those without, ms; every second id belongs to a class."""
    hidden, weight = torch.randn(rows, depth), torch.randn(size, depth)
    of = np.random.default_rng(0).integers(-classes, classes, size)
    grouped = TokenClasses(np.maximum(of, -1), classes)
    cases = {
        "without": lambda: token_statistics(hidden, weight, needs=()),
        "with": lambda: token_statistics(hidden, weight, needs=(), classes=grouped),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(7):
        for name, case in cases.items():
            taken[name].append(1e3 * seconds(case, 1))
    return {name: median(values) for name, values in taken.items()}


def accuracy(count: int) -> dict[str, Any]:
    """Additions answered freely, with the answer's form given, and what each took."""
    model, rng = dllm.load("nano"), np.random.default_rng(0)
    form = r"\d+ \+ \d+: .*The answer is \d+\."
    right = {"free": [], "form": []}  # type: dict[str, list[bool]]
    spent, forwards = dict.fromkeys(right, 0.0), dict.fromkeys(right, 0)
    for _ in range(count):
        a, b = (int(x) for x in rng.integers(10, 90, 2))
        for name in right:
            how = {"regex": form} if name == "form" else {}
            began = time.process_time()
            out = dllm.generate(model, f"What is {a} + {b}?", max_new_tokens=48, **how)
            spent[name] += time.process_time() - began
            forwards[name] += out.nfe
            right[name].append(out.text.rstrip(".").split()[-1:] == [str(a + b)])
    gained = sum(y and not x for x, y in zip(*right.values(), strict=True))
    lost = sum(x and not y for x, y in zip(*right.values(), strict=True))
    return {
        "prompts": count, "form": form, "right": {k: sum(v) for k, v in right.items()},
        "gained": gained, "lost": lost, "forwards": forwards,
        "ms_per_forward": {k: 1e3 * spent[k] / forwards[k] for k in right},
    }  # fmt: skip


def literals(count: int) -> dict[str, Any]:
    """Sums as the value of a JSON object, with and without asking for what is always there."""
    model, rng = dllm.load("nano"), np.random.default_rng(1)
    schema = {
        "type": "object", "required": ["question", "answer"],
        "properties": {"question": {"type": "string", "pattern": "^[0-9]+ \\+ [0-9]+$"},
                       "answer": {"type": "integer", "minimum": 0, "maximum": 199}},
    }  # fmt: skip
    result: dict[str, Any] = {}
    for _ in range(count):
        a, b = (int(x) for x in rng.integers(10, 90, 2))
        for sampler in ("threshold", "llada", "llada(remasking=random)"):
            for asked in (False, True):
                out = dllm.generate(
                    model, f"What is {a} + {b}?", sampler=sampler, max_new_tokens=48,
                    json_schema=schema, literals=asked,
                )  # fmt: skip
                name = f"{sampler}, {'literals' if asked else 'plain'}"
                row = result.setdefault(name, {"forwards": 0, "right": 0})
                row["forwards"] += out.nfe
                row["right"] += out.parsed["answer"] == a + b
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", help="folder or hub id of a tokenizer")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.tokens:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokens)
    else:
        tokenizer = dllm.load("nano").tokenizer
    os.environ["DLLM_FORMATS"] = ""  # what was stored is not compiled
    vocabulary, worker = vocabulary_of(tokenizer), Worker()
    worker.compile(source.regex("a"), vocabulary)  # the process, and the tree of the vocabulary
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(), "tokens": len(vocabulary.pieces),
        "formats": {name: host(worker, vocabulary, p) for name, p in FORMATS.items()},
        "statistics_ms": device(), "nano": accuracy(options.prompts),
        "literals": literals(options.prompts // 4),
    }  # fmt: skip
    worker.close()
    text = json.dumps(result, indent=2)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
