"""What structured output costs, and which schemas it takes, beside other libraries.

    python benchmarks/structured.py --schemas FOLDER --output structured.json

Per structure: seconds to compile it, states and classes over the vocabulary of ``--tokens`` (a
folder or hub id of a tokenizer; default the bundled model's), and the CPU time of one step on the
host for a window of 32 undecided positions with random predictions: the likeliest completion, or
a drawn one, with its marginals; per row where eight rows have the structure; and its share of a
step of 15 ms, as of a model of 8B.  Each is the least of 25 in each of 4 rounds.  The judge: the
median where llguidance says what is valid.  On the device: token statistics of 32 rows with classes
and without, on a head of 135M's shape.

``--schemas``: files of MaskBench (github.com/guidance-ai/jsonschemabench, maskbench/data), each
with a schema and instances.  Per library (ours, llguidance; xgrammar and outlines-core where they
are installed): schemas that compile within 10 s and 8 GB, the CPU time of it, and, of ours and
llguidance's, instances that are wrongly taken or refused.  Libraries that ``--libraries`` does not
name keep their row in ``--output``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import time
import warnings
from collections.abc import Callable
from copy import copy
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import dllm
from dllm.core.canvas import Canvas
from dllm.core.errors import ConfigError
from dllm.kernels.statistics import TokenClasses, token_statistics
from dllm.structured import source
from dllm.structured.automaton import Automaton
from dllm.structured.byte_automaton import Unfit
from dllm.structured.compiling import byte_automaton, compile_tokens, prefix_tree
from dllm.structured.format import Format, Question, complete
from dllm.structured.judged import TOP, _Tokens, judged
from dllm.structured.vocabulary import Vocabulary, vocabulary_of

from harness import write  # isort: skip

WINDOW, STEP_8B = 32, 15.0  # positions, milliseconds
ROUNDS = 4  # over all structures: other programs come and go
LIMIT, MEMORY = 10, 8 << 30  # seconds of CPU time and bytes of one schema
SHORTEST = 0.05  # seconds that are timed at once
PERSON = {
    "type": "object", "required": ["name", "age", "tags"],
    "properties": {
        "name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    },
}  # fmt: skip
STRUCTURES = {
    "date": source.regex(r"\d{4}-\d{2}-\d{2}"),
    "email": source.regex(r"[a-z0-9._]+@[a-z0-9]+(\.[a-z]{2,4})+"),
    "choice of 3": source.choice(["yes", "no", "unsure"]),
    "object of 4": source.json_schema(PERSON),
    "any JSON, depth 3": source.json_schema({"type": "object"}),
    "10,000 states": source.json_schema({"type": "object", "required": [f"k{i}" for i in range(44)],
        "properties": {f"k{i}": {"type": "string", "maxLength": 25} for i in range(44)}}),
}  # fmt: skip
JUDGED = {
    "object of 4": source.json_schema(PERSON),
    "expression": source.grammar('start: e\ne: /[0-9]+/ | "(" e ")" | e " + " e'),
}


def seconds(task: Callable[[], object], times: int = 25) -> float:
    """Least processor time of a call: what other programs cost it does not count."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        task()
        taken.append(time.process_time() - began)
    return min(taken)


def host(pieces: Any, tree: Any, wanted: source.Source) -> dict[str, Any]:
    """What one structure costs before and in a step."""
    began = time.process_time()
    tables = compile_tokens(wanted, pieces, tree)
    compiling = time.process_time() - began
    size = len(pieces) + 1
    automaton = Automaton.ending(tables, [size - 1], size - 1, size)
    form, rng = Format(automaton, tables.start), np.random.default_rng(0)
    canvas = Canvas.for_prompt(np.zeros(1, np.int64), 64, mask_id=0, pad_id=0)
    canvas.cap, canvas.noise = 10_000, lambda stream, step, at: rng.random(len(at))
    law = rng.normal(size=(WINDOW, automaton.next.shape[1])) * 3
    ask = Question(form, canvas, np.arange(1, WINDOW + 1), law, law, False)
    draw = Question(form, canvas, ask.positions, law, law, True)
    took = seconds(lambda: complete([ask]))
    return {
        "compile_seconds": compiling, "states": len(automaton.accepting),
        "classes": automaton.next.shape[1], "likeliest_ms": 1e3 * took,
        "drawn_ms": 1e3 * seconds(lambda: complete([draw])),
        "one_of_8_rows_ms": 1e3 / 8 * seconds(lambda: complete([copy(ask) for _ in range(8)]), 3),
        "share_of_15_ms": 1e3 * took / STEP_8B,
    }  # fmt: skip


def judge(vocabulary: Vocabulary, wanted: source.Source, times: int = 60) -> dict[str, Any]:
    """Steps of rows that llguidance judges; a quarter of the proposals is committed each time."""
    size, taken = len(vocabulary.pieces) + 1, list[float]()
    form = judged(wanted, vocabulary, size, (size - 1,), size - 1, None)
    assert form is not None
    rng = np.random.default_rng(0)
    while len(taken) < times:
        canvas = Canvas.for_prompt(np.zeros(1, np.int64), WINDOW, mask_id=0, pad_id=0)
        canvas.cap = WINDOW
        while canvas.masked.any() and len(taken) < times:
            targets = np.flatnonzero(canvas.masked)
            ids = rng.integers(1, size, (len(targets), TOP))
            logprob = -np.sort(-rng.normal(size=ids.shape) * 3, axis=1)
            logprob -= np.logaddexp.reduce(logprob, axis=1)[:, None]
            began = time.process_time()
            found = form.complete(canvas, targets, ids, logprob, 0.0)
            taken.append(time.process_time() - began)
            assert found is not None
            chosen = rng.random(len(targets)) < 0.25
            canvas.commit(targets[chosen], found[0][chosen], found[1][chosen].astype(np.float32))
    return {"p50_ms": 1e3 * float(np.quantile(taken, 0.5)),
            "p95_ms": 1e3 * float(np.quantile(taken, 0.95))}  # fmt: skip


def device(rows: int = 32, depth: int = 576, size: int = 49_152, classes: int = 120) -> Any:
    """Statistics with classes and without, interleaved, ms; every second id belongs to a class."""
    hidden, weight = torch.randn(rows, depth), torch.randn(size, depth)
    of = np.random.default_rng(0).integers(-classes, classes, size)
    grouped = TokenClasses(np.maximum(of, -1), classes)
    taken: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(7):
        for name, values in taken.items():
            given = grouped if name == "with" else None
            task = lambda: token_statistics(hidden, weight, needs=(), classes=given)  # noqa: B023, E731
            values.append(1e3 * seconds(task, 1))
    return {name: median(values) for name, values in taken.items()}


def libraries(vocabulary: Vocabulary) -> dict[str, Callable[[Any], Any]]:
    """Per library a function that compiles a schema, to a function that accepts texts or None, and
    raises where it cannot."""
    pieces, size = vocabulary.pieces, len(vocabulary.pieces) + 1
    tree = prefix_tree(pieces)

    def ours(schema: Any) -> Any:
        wanted = source.json_schema(schema)
        compile_tokens(wanted, pieces, tree)
        return byte_automaton(wanted)[0].accepts

    guidance = importlib.import_module("llguidance")
    tokens = _Tokens(pieces, size, size - 1)
    tokenizer = guidance.LLTokenizer(guidance.TokenizerWrapper(tokens))

    def guided(schema: Any) -> Any:
        how = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
        grammar = guidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=how)
        matcher = guidance.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.get_error():
            raise ValueError(matcher.get_error())
        matcher.compute_bitmask()

        def accepts(text: bytes) -> bool:
            ids = [*tokens(text), size - 1]
            return bool(matcher.validate_tokens(ids) == len(ids))

        return accepts

    result: dict[str, Callable[[Any], Any]] = {"dllm": ours, "llguidance": guided}
    try:
        grammars = importlib.import_module("xgrammar")
        known = [p or b"<%d>" % i for i, p in enumerate(pieces)] + [b"<stop>"]
        info = grammars.TokenizerInfo(known, stop_token_ids=[size - 1])
        compiler = grammars.GrammarCompiler(info, max_threads=1, cache_enabled=False)

        def compiled(schema: Any) -> None:
            compiler.compile_json_schema(json.dumps(schema))

        result["xgrammar"] = compiled
    except ImportError:
        pass
    try:
        outlines = importlib.import_module("outlines_core")
        of = dict[bytes, list[int]]()
        for i, piece in enumerate(pieces):
            if piece is not None:
                of.setdefault(piece, []).append(i)
        words = outlines.Vocabulary(size - 1, of)
        build = importlib.import_module("outlines_core.json_schema").build_regex_from_schema

        def indexed(schema: Any) -> None:
            outlines.Index(build(json.dumps(schema)), words)

        result["outlines-core"] = indexed
    except ImportError:
        pass
    return result


def apart(task: Callable[[], Any]) -> Any:
    """What a task returns in a process of its own, within `LIMIT` and `MEMORY`; None beyond."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            os.write(write, json.dumps(task()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else None


def tried(compiled: Callable[[Any], Any], given: dict[str, Any]) -> Any:
    """Seconds that a schema takes, and per instance whether it is valid and whether it is
    accepted; None where the schema is refused."""
    began, times, taken = time.process_time(), 0, 0.0
    while taken < SHORTEST:
        try:
            accepts = compiled(given["schema"])
        except (ConfigError, Unfit, ValueError, RuntimeError, MemoryError):
            return None
        times, taken = times + 1, time.process_time() - began
    tests = []
    for test in given.get("tests", ()) if accepts is not None else ():
        text = json.dumps(test["data"], ensure_ascii=False)
        tests.append((test["valid"], accepts(text.encode("utf-8", "replace"))))
    return taken / times, tests


def coverage(folder: Path, vocabulary: Vocabulary, names: str) -> dict[str, Any]:
    """The schemas of a folder by library."""
    table: dict[str, Any] = {}
    files = sorted(folder.glob("*.json"))
    given = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for name, compiled in libraries(vocabulary).items():
        if name not in names.split(","):
            continue
        found = [apart(lambda: tried(compiled, one)) for one in given]  # noqa: B023
        taken = [each[0] for each in found if each]
        tests = [test for each in found if each for test in each[1]]
        valid = [accepted for expected, accepted in tests if expected]
        invalid = [accepted for expected, accepted in tests if not expected]
        table[name] = {
            "schemas": len(files), "compile": len(taken), "p50_s": float(np.quantile(taken, 0.5)),
            "p90_s": float(np.quantile(taken, 0.9)), "max_s": max(taken),
            "invalid_accepted": f"{sum(invalid)} of {len(invalid)}",
            "valid_refused": f"{len(valid) - sum(valid)} of {len(valid)}",
        }  # fmt: skip
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", help="folder or hub id of a tokenizer")
    parser.add_argument("--schemas", type=Path, help="folder of MaskBench's files")
    parser.add_argument("--libraries", default="dllm,llguidance,xgrammar,outlines-core")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.tokens:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokens)
    else:
        tokenizer = dllm.load("nano").tokenizer
    vocabulary = vocabulary_of(tokenizer)
    tree = prefix_tree(vocabulary.pieces)
    rounds = [
        {name: host(vocabulary.pieces, tree, s) for name, s in STRUCTURES.items()}
        for _ in range(ROUNDS)
    ]
    least = {
        name: {key: min(each[name][key] for each in rounds) for key in rounds[0][name]}
        for name in STRUCTURES
    }
    result: dict[str, Any] = {
        "threads": torch.get_num_threads(), "tokens": len(vocabulary.pieces),
        "structures": least,
        "judged": {name: judge(vocabulary, wanted) for name, wanted in JUDGED.items()},
        "statistics_ms": device(), "schemas": {},
    }  # fmt: skip
    if options.output and options.output.exists():
        result["schemas"] = json.loads(options.output.read_text(encoding="utf-8"))["schemas"]
    if options.schemas:
        result["schemas"] |= coverage(options.schemas, vocabulary, options.libraries)
    print(json.dumps(result, indent=1))
    if options.output:
        write(options.output, result)


if __name__ == "__main__":
    main()
