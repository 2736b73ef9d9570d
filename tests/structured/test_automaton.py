"""Automata over tokens against the expressions they come from, and against another library."""

import re
from functools import cache
from typing import Any

import interegular
import numpy as np
import pytest

from dllm.structured.automaton import Automaton
from dllm.structured.byte_automaton import Unfit

from ..thin import some
from .toy import PAD, PATTERNS, PIECES, SIZE, STOP, automaton, sequences, text


@cache
def oracle(pattern: str) -> interegular.FSM:
    return interegular.parse_pattern(pattern).to_fsm()


def matches(pattern: str, spelt: bytes) -> bool:
    """Whether both oracles accept, who have to agree."""
    try:
        shown = spelt.decode()
    except UnicodeDecodeError:
        return False
    result = re.fullmatch(pattern, shown, re.ASCII) is not None
    assert oracle(pattern).accepts(shown) == result
    return result


@pytest.mark.parametrize("pattern", some(PATTERNS, 2))
def test_every_sequence_of_tokens(pattern: str) -> None:
    built, start, stripped = automaton(pattern)
    for tokens in sequences(3):
        for begin, blank in ((start, b""), (stripped, b" ")):
            state = built.run(begin, np.array(tokens))
            spelt = text(tokens)
            expected = spelt is not None and matches(pattern, spelt.removeprefix(blank))
            ended = state >= 0 and bool(built.accepting[state] or built.closed[state])
            assert ended == expected, (tokens, spelt)
            assert STOP not in tokens or state < 0 or built.closed[state]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_state_is_a_dead_end(pattern: str) -> None:
    built, *_ = automaton(pattern)
    assert (built.accepting | built.closed | (built.next >= 0).any(1)).all()
    alive = built.accepting | built.closed
    for _ in range(len(alive)):
        alive = alive | built.before(alive)
    assert alive.all()


@pytest.mark.parametrize(
    ("pattern", "least"), list(zip(PATTERNS, (0, 1, 1, 1, 1, 5, 1, 1), strict=True))
)
def test_the_fewest_tokens(pattern: str, least: int) -> None:
    built, start, _ = automaton(pattern)
    assert built.need[start] == least


def test_a_text_that_no_tokens_spell() -> None:
    with pytest.raises(Unfit, match="tokens"):
        automaton("a+c")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_tokens_of_a_class_do_the_same(pattern: str) -> None:
    built, *_ = automaton(pattern)
    assert built.of[1] == built.of[18], "equal pieces"
    columns = [tuple(built.next[:, c]) for c in range(built.next.shape[1])]
    assert len(set(columns)) == len(columns) or columns.count(columns[-1]) == 2  # stop and padding
    assert built.of[PAD] != built.of[STOP] and (built.of[len(PIECES) :] == -1).all()


def test_what_leads_to_an_end() -> None:
    """Backwards over tokens, given and free, as forwards over every way to fill them."""
    rng = np.random.default_rng(0)
    for pattern in PATTERNS[:4]:
        built, *_ = automaton(pattern)
        final = built.accepting | built.closed
        tokens, masked = rng.integers(0, SIZE, 2), rng.random(2) < 0.6
        result = built.leading(tokens, masked, final)
        for state in range(len(final)):
            ways = (np.where(masked, filled, tokens) for filled in sequences(2))
            ends = (built.run(state, way) for way in ways)
            assert result[state] == any(end >= 0 and final[end] for end in ends)


@pytest.mark.parametrize("axes", [1, 2])
def test_several_side_by_side(monkeypatch: pytest.MonkeyPatch, axes: int) -> None:
    """Also with NumPy 2.0.0, whose inverse along an axis keeps the others."""
    single = [automaton(pattern)[:2] for pattern in PATTERNS[:3]]
    unique = np.unique

    def found(array: Any, **how: Any) -> Any:
        values, inverse = unique(array, **how)
        return values, inverse.reshape((1,) * (axes - 1) + (-1,))

    monkeypatch.setattr(np, "unique", found)
    joined, offsets = Automaton.union([built for built, _ in single])
    monkeypatch.undo()
    for (built, start), offset in zip(single, offsets, strict=True):
        for tokens in list(sequences(3))[::7]:
            alone, here = (
                built.run(start, np.array(tokens)),
                joined.run(start + offset, np.array(tokens)),
            )
            assert here == (alone + offset if alone >= 0 else -1)
