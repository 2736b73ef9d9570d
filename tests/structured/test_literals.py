"""Text without a choice is written without the model, and nothing else is."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

import dllm
from dllm.structured.automaton import Automaton
from dllm.structured.literals import Literals

from ..thin import some
from .toy import PATTERNS, PIECES, automaton

SCHEMA = {
    "type": "object", "required": ["first", "second"],
    "properties": {"first": {"type": "boolean"}, "second": {"enum": [10, 20]}},
}  # fmt: skip


def texts(built: Automaton, state: int, depth: int) -> Iterator[bytes]:
    """What up to so many tokens spell from a state to an end."""
    if built.accepting[state]:
        yield b""
    for token, piece in enumerate(PIECES if depth else ()):
        follow = built.run(state, np.array([token]))
        if piece and follow >= 0:
            yield from (piece + rest for rest in texts(built, follow, depth - 1))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_all_texts_begin_with_it(pattern: str) -> None:
    built, *_ = automaton(pattern)
    literals = Literals(built, PIECES)
    for state in range(len(built.accepting) - 1):
        token = literals.token(state)
        if token is not None:
            assert all(text.startswith(PIECES[token] or b"-") for text in texts(built, state, 4))


@pytest.mark.parametrize(
    ("pattern", "run"),
    [(r'a\{"(1|2)', b'a{"'), ("ab(1|12)", b"ab1"), ("(ab|aa)b", b"a"), ("abab", b"abab"),
     ("a*", b""), ('"é"', '"é"'.encode()), ("(a|b)1", b""), (r'\{"":2?', b'{"":')],
)  # fmt: skip
def test_how_far_it_reaches(pattern: str, run: bytes) -> None:
    built, start, _ = automaton(pattern)
    tokens, _ = Literals(built, PIECES).run(start, 9)
    assert b"".join(PIECES[token] or b"-" for token in tokens) == run


def test_answers_with_literals(nano: dllm.DiffusionModel) -> None:
    how = {"json_schema": SCHEMA, "max_new_tokens": 40, "sampler": "llada"}
    plain = dllm.generate(nano, "What is 23 + 12?", **how)
    out = dllm.generate(nano, "What is 23 + 12?", literals=True, **how)
    assert out.nfe < plain.nfe and set(out.parsed) == {"first", "second"}
    events = list(dllm.stream(nano, "What is 23 + 12?", literals=True, **how))
    assert "".join(event.text for event in events) == out.text
    assert events[0].text.startswith('{"first":')
    assert json.loads(out.text) == out.parsed
    for temperature in (0.0, 1.0):
        out = dllm.generate(nano, "Is it?", choice=["yes, it is", "yes, it was"], literals=True,
                            temperature=temperature, constraints={2: "s"})  # fmt: skip
        assert out.text in ("yes, it is", "yes, it was")
    with pytest.raises(
        dllm.ConfigError, match="literals is about structured output: pass one of regex"
    ):
        dllm.generate(nano, "one", literals=True)


@pytest.mark.parametrize("sampler", some(["llada(remasking=random)", "localleap"], 1))
def test_a_canvas_that_literals_fill_still_grows(nano: dllm.DiffusionModel, sampler: str) -> None:
    how = {"sampler": sampler, "length": "append(block=4)", "max_new_tokens": 40, "literals": True}
    for choice in ["quick brown foxes"], ["quick brown fox", "quick brown fix"]:
        for seed in range(3):
            out = dllm.generate(nano, "What?", choice=choice, seed=seed, temperature=1.0, **how)
            assert out.text in choice and 8 < out.canvas < 40


@pytest.mark.parametrize("sampler", some(["localleap", "threshold", "llada(remasking=random)"], 1))
def test_literals_beside_sampled_tokens(sampler: str) -> None:
    how = {"sampler": sampler, "block_length": 3, "temperature": 1.0, "max_new_tokens": 40}
    out = dllm.generate("nano", "What is 23 + 12?", json_schema=SCHEMA, literals=True, **how)
    assert set(out.parsed) == {"first", "second"}
