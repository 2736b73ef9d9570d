"""From a regular expression to an automaton over tokens; the program of the worker process.

`outlines_core` turns the expression into an automaton over bytes; it is made minimal, and every
token is walked through it from every state at once, along a tree of the vocabulary's prefixes.
Tokens that lead from each state to the same state are one class (Dang and Ermon, arXiv 2607.07026).

The process is started with this file, which therefore imports nothing of the library.
"""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import IO, Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
HashArray = npt.NDArray[np.uint64]

VERSION = 1  # of what is compiled: automata of another are compiled again
MOST_STATES = 4096
MOST_EDGES = 50_000
MEMORY = 4 << 30  # bytes of address space
FIRST, LAST = "\U0010fffe", "\U0010ffff"  # no characters of any text: expressions lack them
OK, REFUSED = b"+", b"-"  # how an answer begins
ROOM = 1 << 22  # states of tokens that are followed at once


class Unfit(ValueError):
    """An expression that is understood, and whose automaton cannot be used."""


@dataclass(frozen=True)
class Level:
    """The prefixes of one length in a vocabulary: the index of each one's ``parent`` in the level
    before, its last ``byte``, and the ``tokens`` that end there with the indices of their
    ``nodes``."""

    parent: IntArray
    byte: IntArray
    tokens: IntArray
    nodes: IntArray


def prefix_tree(pieces: Sequence[bytes | None]) -> list[Level]:
    """All prefixes of a vocabulary, by their length."""
    size = max((len(piece) for piece in pieces if piece), default=0)
    index: list[dict[bytes, int]] = [{} for _ in range(size + 1)]
    ends: list[list[tuple[int, int]]] = [[] for _ in range(size + 1)]
    index[0][b""] = 0
    for token, piece in enumerate(pieces):
        if not piece:
            continue
        for n in range(1, len(piece) + 1):
            index[n].setdefault(piece[:n], len(index[n]))
        ends[len(piece)].append((token, index[len(piece)][piece]))
    levels = []
    for n in range(1, size + 1):
        parent = [index[n - 1][prefix[:-1]] for prefix in index[n]]
        last = [prefix[-1] for prefix in index[n]]
        tokens, nodes = np.array(ends[n], np.int64).reshape(-1, 2).T
        levels.append(Level(np.array(parent), np.array(last), tokens, nodes))
    return levels


def byte_automaton(pattern: str) -> tuple[IntArray, BoolArray, int]:
    """(S + 1, 256) next states, the last state being dead; (S,) which accept; the first state.

    The library also prepares to find the expression within a text, which may take far more states,
    and forgets how a text that may end goes on to one that may not.  So the expression stands
    between two characters that it does not contain: it begins in one place only, and ends behind
    the last.

    Raises `ValueError` for an expression that is not understood.
    """
    from outlines_core import Index, Vocabulary

    end = 256
    whole = f"{FIRST}(?:{pattern}){LAST}"
    try:
        index = Index(whole, Vocabulary(end, {bytes([i]): [i] for i in range(256)}))
    except ValueError as error:
        if "no transitions" in str(error):
            raise Unfit("allows no text") from None
        raise
    transitions, final = index.get_transitions(), index.get_final_states()
    number = {state: i for i, state in enumerate(dict.fromkeys([*transitions, *final]))}
    dead = len(number)
    table = np.full((dead + 1, 256), dead)
    for state, edges in transitions.items():
        edges.pop(end, None)
        table[number[state], list(edges)] = [number[target] for target in edges.values()]
    last, state = np.append(np.isin(list(number), list(final)), False), np.arange(dead + 1)
    for byte in LAST.encode():
        state = table[state, byte]
    start = number[index.get_initial_state()]
    for byte in FIRST.encode():
        start = int(table[start, byte])
    return np.where(last[table], dead, table), last[state[:-1]], start


def with_blank(table: IntArray, accepting: BoolArray, start: int) -> tuple[IntArray, BoolArray]:
    """The same with one state more, the last but the dead one: ``start``, where a blank that comes
    first counts for nothing."""
    size = len(accepting)
    table = np.where(table == size, size + 1, table)
    stripped = table[start].copy()
    stripped[0x20] = start
    table = np.vstack([table[:-1], stripped, table[-1:]])
    return table, np.append(accepting, accepting[start])


def minimal(table: IntArray, accepting: BoolArray) -> tuple[IntArray, BoolArray, IntArray]:
    """States that accept the same texts made one; and which state became which, (S,)."""
    random = np.random.default_rng(0)
    numbers = random.integers(1, 2**63, (2, len(table) + 256), np.uint64)
    table_, columns = np.unique(table, axis=1, return_inverse=True)  # bytes that act alike
    weight = numbers[1, : table_.shape[1]]
    group = np.append(accepting, False).astype(np.int64)
    count = 0
    while True:
        names = numbers[0][group]
        key = (names[table_] * weight).sum(1) * np.uint64(3) + names
        group, before = np.unique(key, return_inverse=True)[1].astype(np.int64), count
        count = int(group.max()) + 1
        if count == before:
            break
    dead = group[-1]
    order = np.concatenate([np.arange(dead), np.arange(dead + 1, count), [dead]])
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    group = rank[group]
    first = np.unique(group, return_index=True)[1]
    return group[table_[first]][:, columns], np.append(accepting, False)[first[:-1]], group[:-1]


def class_hashes(table: IntArray, tree: Sequence[Level], size: int) -> HashArray:
    """(size,) a number per token, equal for those that lead from each state to the same state; 0
    where they lead from none to any."""
    states = len(table) - 1
    random = np.random.default_rng(1)
    source = random.integers(1, 2**63, states, np.uint64)
    target = np.append(random.integers(1, 2**63, states, np.uint64), np.uint64(0))
    result = np.zeros(size, np.uint64)
    step = max(1, ROOM // max((len(level.byte) for level in tree), default=1))
    for low in range(0, states, step):
        here = np.arange(low, min(low + step, states))
        maps, place = here[None], np.zeros(1, np.int64)  # of the live nodes; a node's row in them
        for level in tree:
            row = place[level.parent]
            live = np.flatnonzero(row >= 0)
            maps = table[maps[row[live]], level.byte[live, None]]
            alive = (maps != states).any(1)
            maps, live = maps[alive], live[alive]
            place = np.full(len(level.byte), -1)
            place[live] = np.arange(len(live))
            row = place[level.nodes]
            ends = row >= 0
            result[level.tokens[ends]] += (target[maps[row[ends]]] * source[here]).sum(1)
            if not len(live):
                break
    return result


@dataclass(frozen=True)
class Tables:
    """An automaton over tokens: ``of`` (V,) the class of each token, -1 for none; ``next`` (S, C)
    states, -1 for none; ``accepting`` (S,); ``start`` and, where a blank at the start of a text is
    lost, ``stripped_start``."""

    of: IntArray
    next: IntArray
    accepting: BoolArray
    start: int
    stripped_start: int


def compile_tokens(pattern: str, pieces: Sequence[bytes | None], tree: list[Level]) -> Tables:
    """The automaton of ``pattern`` over a vocabulary.

    Raises `ValueError` for an expression that is not understood, `Unfit` beyond the limits.
    """
    table, accepting, start = byte_automaton(pattern)
    table, accepting = with_blank(table, accepting, start)
    table, accepting, became = minimal(table, accepting)
    states = len(accepting)
    if states > MOST_STATES:
        raise Unfit(f"has {states} states, at most {MOST_STATES} are taken: allow less")
    keys = class_hashes(table, tree, len(pieces))
    values, first, of = np.unique(keys, return_index=True, return_inverse=True)
    follow = np.empty((states, len(values)), np.int64)
    for c, token in enumerate(first.tolist()):
        state = np.arange(states)
        for byte in (pieces[token] or b"") if values[c] else b"":
            state = table[state, byte]
        follow[:, c] = state if values[c] else states
    starts = (int(became[start]), int(became[-1]))
    return _trimmed(of, follow, accepting, starts)


def _trimmed(
    of: IntArray, follow: IntArray, accepting: BoolArray, starts: tuple[int, int]
) -> Tables:
    """Only states that tokens lead to and out of, and classes that still differ, in the order of
    their first tokens."""
    states, dead = len(accepting), len(accepting)
    padded = np.vstack([follow, np.full((1, follow.shape[1]), dead)])
    useful = np.append(accepting, False)
    while True:
        more = useful | useful[padded].any(1)
        if (more == useful).all():
            break
        useful = more
    reached = np.zeros(states + 1, np.bool_)
    reached[list(starts)] = True
    front = np.flatnonzero(reached)
    while front.size:
        new = np.unique(padded[front])
        front = new[~reached[new]]
        reached[front] = True
    kept = np.flatnonzero(useful[:states] & reached[:states])
    rank = np.full(states + 1, -1)
    rank[kept] = np.arange(len(kept))
    columns, classes = np.unique(rank[padded[kept]], axis=1, return_inverse=True)
    of = classes[of]
    live = np.atleast_1d((columns >= 0).any(0))[of]
    order = of[live][np.sort(np.unique(of[live], return_index=True)[1])]
    number = np.full(columns.shape[1], -1)
    number[order] = np.arange(len(order))
    result = np.where(live, number[of], -1)
    if min(rank[list(starts)]) < 0:
        raise Unfit("allows no text that the tokens of the model can spell")
    edges = int((columns[:, order] >= 0).sum())
    if edges > MOST_EDGES:
        raise Unfit(f"has {edges} edges, at most {MOST_EDGES} are taken: allow less")
    return Tables(result, columns[:, order], accepting[kept], int(rank[starts[0]]),
                  int(rank[starts[1]]))  # fmt: skip


def send(stream: IO[bytes], data: bytes) -> None:
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """The next message; raises `EOFError` where the other side is gone."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve() -> None:
    """What the process does: requests on stdin, answers on stdout, until stdin ends."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    trees: dict[str, tuple[list[bytes | None], list[Level]]] = {}
    while True:
        try:
            request = json.loads(receive(sys.stdin.buffer))
        except EOFError:
            return
        if "pieces" in request:
            pieces = [None if p is None else bytes.fromhex(p) for p in request["pieces"]]
            trees[request["key"]] = pieces, prefix_tree(pieces)
            send(sys.stdout.buffer, OK)
        else:
            send(sys.stdout.buffer, answer(request["pattern"], *trees[request["key"]]))


def answer(pattern: str, pieces: Sequence[bytes | None], tree: list[Level]) -> bytes:
    try:
        tables = compile_tokens(pattern, pieces, tree)
    except Unfit as error:
        return REFUSED + str(error).encode()
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].removeprefix("error: ") if lines else "no reason given"
        return REFUSED + f"is not understood: {reason}".encode()
    out = io.BytesIO()
    arrays: Any = {f.name: np.asarray(getattr(tables, f.name)) for f in fields(tables)}
    np.savez(out, **arrays)
    return OK + out.getvalue()


if __name__ == "__main__":
    serve()
