"""A vocabulary of a few pieces, automata over it, and every text of a length."""

from collections.abc import Iterator
from itertools import product

import numpy as np

from dllm.structured.automaton import Automaton
from dllm.structured.compiling import compile_tokens, prefix_tree

PIECES = (
    None, b"a", b"b", b"ab", b"ba", b" ", b" a", b"1", b"12", b"2", b'"', b'{"', b'":', b"\xc3",
    b"\xa9", b"\xc3\xa9", None, b"aa", b"a", b"}",
)  # fmt: skip
STOP, PAD, SIZE = 0, 16, len(PIECES) + 2  # more ids than tokens
TREE = prefix_tree(PIECES)
PATTERNS = (
    "a*", "(ab|ba)+", "(a|b)*a(a|b)", "1?2{1,3}", "é|a", r'\{"(a|b)+":[12]\}', "( a)+b?",
    "(a|12)*b",
)  # fmt: skip


def automaton(pattern: str) -> tuple[Automaton, int, int]:
    """The automaton of a pattern; the states in which texts begin, the second without a blank."""
    tables = compile_tokens({"regex": pattern}, PIECES, TREE)
    built = Automaton.ending(tables, [STOP], PAD, SIZE)
    return built, tables.start, tables.stripped_start


def text(tokens: tuple[int, ...]) -> bytes | None:
    """The bytes of tokens up to the first stop id, None where others follow or none may stand."""
    ended, result = False, b""
    for token in tokens:
        if token == STOP or (ended and token == PAD):
            ended = True
            continue
        piece = PIECES[token] if token < len(PIECES) else None
        if ended or piece is None:
            return None
        result += piece
    return result


def sequences(length: int) -> Iterator[tuple[int, ...]]:
    """Every sequence of ids."""
    return product(range(SIZE), repeat=length)


def weights(rng: np.random.Generator, length: int) -> np.ndarray:
    """(length, SIZE) log-probabilities of independent positions."""
    x = rng.normal(size=(length, SIZE)) * 2
    return x - np.logaddexp.reduce(x, axis=1, keepdims=True)
