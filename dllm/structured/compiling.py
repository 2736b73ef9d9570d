"""From a structure to an automaton over tokens; the program of the worker process.

Parts become an automaton over bytes, and every token is walked through it from every state at
once, along a tree of the vocabulary's prefixes.  Copies of one leaf, such as the strings of a
schema, are walked once: only tokens that leave the leaf are followed from each copy.  Tokens that
lead from each state to the same state are one class (Dang and Ermon, arXiv 2607.07026).
"""

from __future__ import annotations

import io
import json
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..core.errors import ConfigError
from . import grammar
from .expressions import TEXT, regex_part
from .parts import (
    MOST_STEPS,
    Budget,
    ByteAutomaton,
    Bytes,
    Either,
    Leaf,
    Letters,
    Part,
    Repeat,
    Row,
    TooLarge,
    Unfit,
    automaton_of,
    combined,
)
from .reading import DEPTH, Reader

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
HashArray = npt.NDArray[np.uint64]

VERSION = 2  # of what is compiled: automata of another are compiled again
MOST_STATES = 10_000  # of an automaton over tokens
MOST_EDGES = 1_000_000
MOST_CELLS = 40_000_000  # states times classes
MEMORY = 4 << 30  # bytes of address space
OK, REFUSED, WRONG = b"+", b"-", b"!"  # how an answer begins
ROOM = 1 << 22  # states of tokens that are followed at once


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


class Compiler:
    """Reads one structure.  ``source``: plain data as JSON, see `dllm.structured.source`."""

    def __init__(self, depth: int = DEPTH) -> None:
        # Further tries take less, so that all of them together end soon.
        self.budget, self.depth = Budget(MOST_STEPS // (1 if depth == DEPTH else 4)), depth
        self.cut = False  # whether something was written to a depth
        self.ignored: dict[str, None] = {}

    def part(self, source: Mapping[str, Any]) -> Part:
        """The texts of a source.  Raises `ConfigError`, `Unfit`."""
        ((kind, value),) = source.items()
        if kind == "regex":
            return regex_part(value)
        if kind == "choice":
            return Either(tuple(Bytes(text.encode()) for text in value))
        if kind == "row":
            return Row(tuple(map(self.part, value)))
        if kind == "either":
            return Either(tuple(map(self.part, value)))
        if kind == "repeat":
            return Repeat(self.part(value[0]), value[1], value[2])
        if kind == "grammar":
            part, cut = grammar.read(value, self.budget, self.depth)
            self.cut = self.cut or cut
            return part
        if kind == "free":
            return Leaf(self._free(value))
        reader = Reader(value, self.budget, self.depth)
        part = reader.read()
        self.cut, self.ignored = self.cut or reader.cut, {**self.ignored, **reader.ignored}
        return part

    def _free(self, words: Sequence[str]) -> ByteAutomaton:
        """Any text that contains none of the ``words``."""
        anything = Repeat(Letters(TEXT), 0, None)
        result = automaton_of(anything, self.budget)
        for word in words:
            holds = automaton_of(Row((anything, Bytes(word.encode()), anything)), self.budget)
            result = combined(result, holds, self.budget, without=True)
        return result


def byte_automaton(source: Mapping[str, Any]) -> tuple[ByteAutomaton, list[str]]:
    """The automaton of a source over bytes, and unknown keywords that were met.  What contains
    itself, and values of any kind, are written less deep where they would take too much."""
    failed: TooLarge | None = None
    for depth in range(DEPTH, -1, -1):
        compiler = Compiler(depth)
        try:
            automaton = automaton_of(compiler.part(source), compiler.budget)
            if len(automaton.edges) <= MOST_STATES:
                return automaton, list(compiler.ignored)
            failed = TooLarge(
                f"has {len(automaton.edges):,} states, at most {MOST_STATES:,} are taken: "
                "allow less"
            )
        except TooLarge as error:
            failed = error
        except ConfigError:
            if failed is None:
                raise
            break
        if not compiler.cut:
            break
    assert failed is not None
    raise failed


def with_blank(automaton: ByteAutomaton) -> tuple[IntArray, BoolArray]:
    """(S + 2, 256) next states, (S + 1,) which accept.  The state before the dead one is the
    start, where a blank that comes first counts for nothing."""
    table, size = automaton.table().astype(np.int64), len(automaton.edges)
    table[table == size] = size + 1
    stripped = table[automaton.start].copy()
    stripped[0x20] = automaton.start
    table = np.vstack([table[:-1], stripped, table[-1:]])
    ends = np.array(automaton.accepting)
    return table, np.append(ends, ends[automaton.start])


@dataclass(frozen=True)
class Tables:
    """An automaton over tokens: ``of`` (V,) the class of each token, -1 for none; ``next`` (S, C)
    states, -1 for none; ``accepting`` (S,); ``start`` and, where a blank at the start of a text is
    lost, ``stripped_start``; ``ignored``: unknown keywords."""

    of: IntArray
    next: npt.NDArray[np.int32]
    accepting: BoolArray
    start: int
    stripped_start: int
    ignored: npt.NDArray[np.str_]


Walk = tuple[IntArray, IntArray, IntArray]  # tokens, (n, S) where each leads, and from which states


def walked(table: IntArray, tree: Sequence[Level], states: IntArray) -> Iterator[Walk]:
    """Where the tokens of a tree lead from some ``states``, those left out that lead nowhere."""
    dead = len(table) - 1
    step = max(1, ROOM // max((len(level.byte) for level in tree), default=1))
    for low in range(0, len(states), step):
        here = states[low : low + step]
        maps, place = here[None], np.zeros(1, np.int64)  # of the live nodes; a node's row in them
        for level in tree:
            row = place[level.parent]
            live = np.flatnonzero(row >= 0)
            maps = table[maps[row[live]], level.byte[live, None]]
            alive = (maps != dead).any(1)
            maps, live = maps[alive], live[alive]
            place = np.full(len(level.byte), -1)
            place[live] = np.arange(len(live))
            row = place[level.nodes]
            ends = row >= 0
            if ends.any():
                yield level.tokens[ends], maps[row[ends]], here
            if not len(live):
                break


def class_hashes(
    table: IntArray, copies: Sequence[tuple[Leaf, IntArray]], pieces: Sequence[bytes | None],
    tree: Sequence[Level],
) -> HashArray:  # fmt: skip
    """(V,) a number per token, equal for those that lead from each state to the same state; 0
    where they lead from none to any."""
    states = len(table) - 1
    random = np.random.default_rng(1)
    source = random.integers(1, 2**63, states, np.uint64)
    target = np.append(random.integers(1, 2**63, states, np.uint64), np.uint64(0))
    result = np.zeros(len(pieces), np.uint64)
    owned = np.zeros(states, np.bool_)
    for leaf, all_of_it in copies:
        for where in _alike(all_of_it):
            inside = np.flatnonzero(where[0] >= 0)
            mine = ~owned[where[:, inside]]
            # The same state may stand for several copies: the first of them is followed.
            flat = np.where(mine, where[:, inside], -1).ravel()
            first = np.zeros(flat.size, np.bool_)
            first[np.unique(flat, return_index=True)[1]] = True
            mine = (first & (flat >= 0)).reshape(mine.shape)
            if not mine.any() or len(where) < 2:
                continue
            owned[where[:, inside][mine]] = True
            leaving = _follow_leaf(leaf, where, inside, mine, tree, source, target, result)
            some = prefix_tree([p if leaving[t] else None for t, p in enumerate(pieces)])
            for tokens, maps, here in walked(table, some, np.unique(where[:, inside][mine])):
                result[tokens] += (target[maps] * source[here]).sum(1)
    for tokens, maps, here in walked(table, tree, np.flatnonzero(~owned)):
        result[tokens] += (target[maps] * source[here]).sum(1)
    return result


def _alike(where: IntArray) -> list[IntArray]:
    """Copies of a leaf by which of its states they have."""
    groups: dict[bytes, list[IntArray]] = {}
    for copy in np.unique(where, axis=0):
        groups.setdefault((copy >= 0).tobytes(), []).append(copy)
    return [np.array(group) for group in groups.values()]


def _follow_leaf(
    leaf: Leaf, where: IntArray, inside: IntArray, mine: BoolArray, tree: Sequence[Level],
    source: HashArray, target: HashArray, result: HashArray,
) -> BoolArray:  # fmt: skip
    """Add what tokens do that stay within a leaf, for all its copies at once; (V,) which leave it
    from some of its states."""
    size = len(leaf.automaton.edges)
    out, dead = size, size + 1  # behind the leaf, where any byte may follow, and nowhere
    own = leaf.automaton.table()[:size]
    leads = np.full(size + 1, out)
    leads[inside], leads[size] = inside, dead
    table = np.vstack([leads[own], np.full((1, 256), out), np.full((1, 256), dead)])
    sums = np.zeros((size, size + 2), np.uint64)  # of a state and where it leads to
    weight = np.where(mine, source[where[:, inside]], np.uint64(0))
    for i, state in enumerate(inside):
        sums[state, inside] = (weight[:, i, None] * target[where[:, inside]]).sum(0)
    leaving = np.zeros(len(result), np.bool_)
    found: list[tuple[IntArray, HashArray]] = []
    for tokens, maps, here in walked(table, tree, inside):
        leaving[tokens] |= (maps == out).any(1)
        found.append((tokens, sums[here[None], maps].sum(1)))
    for tokens, total in found:
        result[tokens] += np.where(leaving[tokens], np.uint64(0), total)
    return leaving


def compile_tokens(
    source: Mapping[str, Any], pieces: Sequence[bytes | None], tree: list[Level]
) -> Tables:
    """The automaton of ``source`` over a vocabulary.

    Raises `ConfigError` for one that is not understood, `Unfit` beyond the limits.
    """
    automaton, ignored = byte_automaton(source)
    table, accepting = with_blank(automaton)
    states = len(accepting)
    keys = class_hashes(table, automaton.copies, pieces, tree)
    values, first, of = np.unique(keys, return_index=True, return_inverse=True)
    if states * len(values) > MOST_CELLS:
        raise TooLarge(f"has {states:,} states and {len(values):,} classes of tokens: allow less")
    follow = np.empty((states, len(values)), np.int32)
    for c, token in enumerate(first.tolist()):
        state = np.arange(states)
        for byte in (pieces[token] or b"") if values[c] else b"":
            state = table[state, byte]
        follow[:, c] = state if values[c] else states
    starts = automaton.start, states - 1
    return _trimmed(of, follow, accepting, starts, ignored)


def _trimmed(
    of: IntArray, follow: npt.NDArray[np.int32], accepting: BoolArray, starts: tuple[int, int],
    ignored: Sequence[str],
) -> Tables:  # fmt: skip
    """Only states that tokens lead to and out of, and classes that still differ, in the order of
    their first tokens."""
    states = len(accepting)
    source, label = (follow != states).nonzero()
    pairs = np.unique(source * states + follow[source, label])
    arcs = np.stack(np.divmod(pairs, states))
    kept = _reached(arcs, np.array(starts), states)
    kept &= _reached(arcs[::-1], np.flatnonzero(accepting), states)
    if not kept[list(starts)].all():
        raise Unfit("allows no text that the tokens of the model can spell")
    rank = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1).astype(np.int32)
    columns = rank[follow[kept]]
    random = np.random.default_rng(2).integers(1, 2**63, (2, states + 1), np.uint64)
    random[1, -1] = 0  # where a token leads to nothing
    keys = np.zeros(columns.shape[1], np.uint64)
    for row, weight in zip(columns, random[0], strict=False):
        keys += random[1][row] * weight
    _, first, classes = np.unique(keys, return_index=True, return_inverse=True)
    of = classes[of]
    live = (keys[first] != 0)[of]
    order = of[live][np.sort(np.unique(of[live], return_index=True)[1])]
    number = np.full(len(first), -1)
    number[order] = np.arange(len(order))
    columns = columns[:, first[order]]
    edges = int((columns >= 0).sum())
    if edges > MOST_EDGES:
        raise TooLarge(f"has {edges:,} edges, at most {MOST_EDGES:,} are taken: allow less")
    return Tables(
        np.where(live, number[of], -1), columns, accepting[kept], int(rank[starts[0]]),
        int(rank[starts[1]]), np.array([*ignored], np.str_),
    )  # fmt: skip


def _reached(arcs: IntArray, seeds: IntArray, size: int) -> BoolArray:
    """(size,) what arcs (2, A) lead to from the ``seeds``."""
    order = np.argsort(arcs[0], kind="stable")
    target = arcs[1][order].tolist()
    bounds = np.searchsorted(arcs[0][order], np.arange(size + 1)).tolist()
    result = np.zeros(size, np.bool_)
    todo = seeds.tolist()
    result[todo] = True
    while todo:
        state = todo.pop()
        for other in target[bounds[state] : bounds[state + 1]]:
            if not result[other]:
                result[other] = True
                todo.append(other)
    return result


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
            send(sys.stdout.buffer, answer(request["source"], *trees[request["key"]]))


def answer(source: Mapping[str, Any], pieces: Sequence[bytes | None], tree: list[Level]) -> bytes:
    try:
        tables = compile_tokens(source, pieces, tree)
    except Unfit as error:
        return REFUSED + str(error).encode()
    except ConfigError as error:
        return WRONG + str(error).encode()
    except MemoryError:
        return REFUSED + f"takes more than {MEMORY >> 30} GB to compile: allow less".encode()
    out = io.BytesIO()
    arrays: Any = {f.name: np.asarray(getattr(tables, f.name)) for f in fields(tables)}
    np.savez(out, **arrays)
    return OK + out.getvalue()
