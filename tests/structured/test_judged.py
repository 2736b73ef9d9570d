"""Structures that llguidance judges: after every step each row still has a whole valid text."""

import json
import re
from itertools import product
from typing import Any

import jsonschema
import numpy as np
import pytest

import dllm
from dllm.core.canvas import Canvas, Edit
from dllm.core.errors import ConfigError
from dllm.structured import compiling
from dllm.structured.byte_automaton import Budget
from dllm.structured.judged import TOP, Judged, Witness, judged
from dllm.structured.parts import shortest
from dllm.structured.plain import plain
from dllm.structured.source import encoded
from dllm.structured.vocabulary import Vocabulary

from ..thin import covering, slow, some

pytest.importorskip("llguidance")
WORDS = (b'":', b'", "', b"true", b"null", b'{"', b"12", b"ab", b"END", b"IF ", b"((", b"))")
PIECES = (None, None, *(bytes([i]) for i in range(32, 127)), *WORDS)
STOP, PAD, MASK = 0, 1, len(PIECES)
VOCABULARY = Vocabulary(PIECES, False, "judged")
TREE: dict[str, Any] = {
    "$ref": "#/$defs/n",
    "$defs": {"n": {"type": "object", "required": ["v", "k"], "additionalProperties": False,
                    "properties": {"v": {"type": "integer"},
                                   "k": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}},
}  # fmt: skip
GRAMMARS: list[dict[str, Any]] = [
    {"json_schema": TREE},
    {"json_schema": {"type": "object", "required": ["a"], "properties": {
        "a": {"type": "string", "minLength": 2}, "b": {"enum": ["x", "yy", 3]}}}},
    {"json_schema": {"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "null"}}]}},
    {"grammar": 'start: "BEGIN " stmt+ " END"\\nstmt: "x := " /[0-9]+/ ";" | "IF " e " THEN " stmt '
                '" FI;"\\ne: "a" | "(" e ")" | e "+" e'},
    {"grammar": 'start: list\\nlist: "(" (item (" " item)*)? ")"\\nitem: /[a-z]+/ | list'},
    {"grammar": 'root ::= "<" [a-z]+ ">" root* "</>"'},
]  # fmt: skip


def form_of(source: dict[str, Any]) -> Judged:
    source = {
        kind: v.replace("\\n", "\n") if isinstance(v, str) else v for kind, v in source.items()
    }
    budget = Budget()
    part = compiling.Compiler(Budget(depth=1)).part(source)
    text = encoded(plain(source))
    form = judged(text, VOCABULARY, (STOP,), PAD, len(PIECES) + 1, shortest(part, budget))
    assert form is not None
    return form


def spelt(tokens: Any) -> bytes:
    """The text up to its end, behind which only stop ids and padding follow."""
    end = next((i for i, t in enumerate(tokens) if t in (STOP, PAD)), len(tokens))
    assert all(t in (STOP, PAD) for t in tokens[end:])
    return b"".join(PIECES[t] or b"?" for t in tokens[:end])


def accepted(form: Judged, source: dict[str, Any], tokens: Any) -> None:
    end = next((i for i, t in enumerate(tokens) if t in (STOP, PAD)), len(tokens))
    assert form.accepts(form.start, [int(t) for t in tokens[:end]]), spelt(tokens)
    if "json_schema" in source:
        jsonschema.validate(json.loads(spelt(tokens)), source["json_schema"])


def predicted(rng: np.random.Generator, n: int, wish: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest tokens of n positions, of a text that is wished for and others."""
    ids = np.array([rng.permutation(np.arange(MASK))[:TOP] for _ in range(n)]).reshape(n, TOP)
    for i, token in enumerate(wish[:n]):
        if rng.random() < 0.7 and token not in ids[i]:
            ids[i, 0] = token
    x = -np.sort(-rng.normal(size=(n, TOP)) * 3, axis=1)
    return ids, x - np.logaddexp(np.logaddexp.reduce(x, axis=1), 0.0)[:, None]


def walk(seed: int, source: dict[str, Any], steps: int) -> int:
    """Random subsets of the proposals are committed, some of what is decided is opened again, rows
    fork and grow; how many steps were taken."""
    rng, form, taken = np.random.default_rng(seed), form_of(source), 0
    while taken < steps:
        room = form.least() + int(rng.integers(2, 30))
        size = int(rng.integers(2, room + 1))
        canvas = Canvas.for_prompt(np.arange(2, 5), size, mask_id=MASK, pad_id=PAD)
        canvas.cap = room
        canvas.noise = lambda stream, step, at: (
            np.random.default_rng([seed, stream, step])
            .random(len(at))
            .astype(np.float32)
            .clip(1e-6, 1 - 1e-6)
        )
        assert form.fits(canvas)
        wish = rng.integers(2, MASK, room).tolist()
        for _ in range(60):
            if not canvas.masked.any():
                more = min(int(rng.integers(1, 8)), canvas.start + room - canvas.end)
                if more <= 0 or (canvas.tokens == STOP).any():
                    break
                canvas.edit(Edit(canvas.end, 0, more))
                canvas.region = canvas.start, canvas.end
            taken += 1
            low = int(np.flatnonzero(canvas.masked)[0])
            targets = np.flatnonzero(canvas.masked[: low + int(rng.integers(1, 40))])
            targets = targets[targets >= canvas.prompt_length]
            found = form.complete(
                canvas, targets, *predicted(rng, len(targets), wish), float(rng.choice([0.0, 1.0]))
            )
            assert found is not None
            token, sure, known = found
            assert (sure <= 0).all() and np.isfinite(sure).all() and np.isfinite(known).all()
            accepted(form, source, canvas.state(Witness).tokens)
            chosen = rng.random(len(targets)) < rng.random()
            if rng.random() < 0.2:
                canvas = canvas.fork()
            canvas.commit(targets[chosen], token[chosen], sure[chosen].astype(np.float32))
            assert form.fits(canvas)
            decided = np.flatnonzero(~canvas.masked[canvas.prompt_length :]) + canvas.prompt_length
            if rng.random() < 0.3 and decided.size:
                canvas.remask(rng.choice(decided, int(rng.integers(1, decided.size + 1)), False))
                assert form.fits(canvas)
        ended = canvas.end == canvas.start + room or (canvas.tokens == STOP).any()
        if ended and not canvas.masked.any():
            accepted(form, source, canvas.tokens[canvas.prompt_length : canvas.end])
    return taken


@pytest.mark.parametrize("steps", [50, pytest.param(170, marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", range(len(GRAMMARS)))
def test_every_row_keeps_a_whole_text(number: int, steps: int) -> None:
    assert walk(number, GRAMMARS[number], steps) >= steps


@pytest.mark.parametrize("seed", some(range(5), 1))
def test_no_grammar_with_texts_is_refused(seed: int) -> None:
    """Random rules, each with a way to an end; words that have to stand at both ends."""
    rng = np.random.default_rng(seed)
    for _ in range(10 if seed else 3):
        count = int(rng.integers(2, 6))
        rules = []
        for i in range(count):
            ways = []
            for last in (False, False, True):
                later = [f"r{j}" for j in range(i + 1 if last else 0, count)]
                words = [
                    '"BEGIN"',
                    '" IF "',
                    '"FI"',
                    '"<" /[a-z]+/ ">"',
                    '"("',
                    '")"',
                    '"#" /[0-9]{2,}/ ";"',
                ]
                items = [
                    str(rng.choice(later if later and rng.random() < 0.5 else words))
                    for _ in range(int(rng.integers(1, 5)))
                ]
                ways.append(" ".join(items))
            rules.append(f"r{i}: " + " | ".join(ways))
        text = 'start: "BEGIN " r0 " END"\n' + "\n".join(rules)
        form = form_of({"grammar": text})
        accepted(form, {}, form.first)


LARGE = r"(a|b)*a(a|b){14}"  # an automaton of more than 30,000 states


@pytest.mark.parametrize("how", [
    {"sampler": "threshold(0.6)"}, {"sampler": "llada", "temperature": 1.0},
    {"sampler": "remdm"}, {"length": "append"}, {"confidence": "model"},
])  # fmt: skip
def test_generated_texts(tiny: dllm.DiffusionModel, how: dict[str, Any]) -> None:
    out = dllm.generate(tiny, [5, 9, 17], regex=LARGE, max_new_tokens=40, **how)
    assert out.structured == "completable"
    assert set(out.text) <= {"a", "b"} and out.text[-15] == "a"


def test_what_needs_exact_probabilities_is_refused(tiny: dllm.DiffusionModel) -> None:
    for how, word in (
        ({"sampler": "lopa(k=3)"}, "compares branches"), ({"literals": True}, "literals"),
        ({"max_new_tokens": 8}, "at least"), ({"temperature": 1.0, "top_p": 0.5}, "top_p"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=word):
            dllm.generate(tiny, [5, 9, 17], **{"regex": LARGE, "max_new_tokens": 40, **how})


def test_batches_and_rows_alone(tiny: dllm.DiffusionModel) -> None:
    prompts = [[5, 9, 17], [7, 8], [3, 3, 3, 40]]
    how: dict[str, Any] = {"regex": LARGE, "max_new_tokens": 30, "temperature": 1.0}
    batch = dllm.generate(tiny, prompts, **how)
    alone = [dllm.generate(tiny, [prompt], **how)[0] for prompt in prompts]
    assert batch[0].tokens == alone[0].tokens
    assert [out.structured for out in batch] == ["completable"] * 3


def written(kind: str, regex: str) -> dict[str, Any]:
    """An expression as a source of its own, in a schema and in a grammar."""
    return {
        "regex": {"regex": regex},
        "json_schema": {"json_schema": {"type": "string", "pattern": f"^({regex})$"}},
        "grammar": {"grammar": f"start: /{regex}/"},
    }[kind]


KINDS = ["regex", "json_schema", "grammar"]
READ_OTHERWISE = [
    r"(\d|\s)*\d(\d|\s){14}", r"(?i:(k|b)*k(k|b){14})", r"[^b]*a[^b]{14}",
    r"(a|\102)*a(a|\x42){14}",
]  # fmt: skip
REFUSED = [("a*+a", "no (text|value)"), ("a(?=b)", "look-around")]
REFUSED_LARGE = [(r"(a|b)*a(a|b){14}c*+c", "no (text|value)"), (r"(a|b)*a(a|b){14}c*+", "states")]


@pytest.mark.parametrize(("kind", "regex"), some(product(KINDS, READ_OTHERWISE), 2))
def test_judged_expressions_are_read_as_python_reads_them(
    tiny: dllm.DiffusionModel, regex: str, kind: str
) -> None:
    how = {"max_new_tokens": 40, "temperature": 3.0, **written(kind, regex)}
    for seed in range(3):
        out = dllm.generate(tiny, [5, 9, 17], seed=seed, sampler="fixed(4)", **how)
        text = json.loads(out.text) if kind == "json_schema" else out.text
        assert out.structured == "completable"
        assert re.fullmatch(regex, text, re.ASCII)


@pytest.mark.parametrize(
    ("refused", "kind"), [*covering(REFUSED, KINDS), *slow(REFUSED_LARGE, KINDS)]
)
def test_what_a_judge_would_read_otherwise_is_refused(
    tiny: dllm.DiffusionModel, refused: tuple[str, str], kind: str
) -> None:
    regex, why = refused
    with pytest.raises(ConfigError, match=why):
        dllm.generate(tiny, [5, 9, 17], max_new_tokens=40, **written(kind, regex))


def test_a_judge_knows_the_dates_that_there_are() -> None:
    source = {"json_schema": {"type": "string", "format": "date"}}
    form = form_of(source)
    for text, valid in (b'"2024-02-29"', True), (b'"2023-02-29"', False), (b'"0000-01-01"', False):
        assert form.accepts(form.start, [PIECES.index(bytes([c])) for c in text]) == valid


def test_only_expressions_of_a_schema_are_written_otherwise() -> None:
    data = {"pattern": "a++", "format": "date"}
    schema: dict[str, Any] = {
        "properties": {"pattern": {"const": data, "enum": [data]}, "format": {"pattern": "^b$"}},
        "patternProperties": {"^c$": {"items": [True, {"pattern": "d"}]}},
    }
    told = plain({"json_schema": schema})["json_schema"]
    assert told["properties"]["pattern"] == schema["properties"]["pattern"]
    ((key, named),) = told["patternProperties"].items()
    found = told["properties"]["format"]["pattern"], key, named["items"][1]["pattern"]
    for pattern, text, other in zip(found, ("b", "c", "ade\n"), ("bb", "C", "a"), strict=True):
        pattern = re.sub(r"\\x\{(\w+)\}", lambda m: rf"\U{int(m[1], 16):08x}", pattern)
        assert re.search(pattern, text) and not re.search(pattern, other)
    assert named["items"][0] is True


def test_a_judge_reads_grammars_with_what_is_ignored() -> None:
    rules = '%import common (INT, WS)\nstart: (NAME "=" INT ";")+\nNAME: /[a-c]/i\n%ignore WS'
    form = form_of({"grammar": rules})
    for text, valid in (
        (b"a = 12;B=3;", True),
        (b"C=1 ;", True),
        (b"d=1;", False),
        (b"a=1", False),
    ):
        assert form.accepts(form.start, [PIECES.index(bytes([c])) for c in text]) == valid


@pytest.mark.parametrize(("grammar", "text"), [
    ('%llguidance {}\nstart: "a" num\nnum: %json {"type": "integer"}', r"a-?\d+"),
    ('start: "<" %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": '
     '["a"], "additionalProperties": false} ">"', r'<\{\s*"a"\s*:\s*-?\d+\s*\}>'),
    ("start: word\nword[lazy]: /[a-z]*b/", r"[ac-z]*b"),
])  # fmt: skip
def test_words_of_the_judge_alone_are_left_to_it(
    tiny: dllm.DiffusionModel, grammar: str, text: str
) -> None:
    out = dllm.generate(tiny, "hello", grammar=grammar, max_new_tokens=16)
    assert re.fullmatch(text, out.text) and out.structured == "completable"
