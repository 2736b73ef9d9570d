"""From a structure to an automaton over tokens, and what the worker process does of it.

Parts become an automaton over bytes, and every token is walked through it from every state at
once, along a tree of the vocabulary's prefixes.  Prefixes that do the same are walked once.  Tokens
that lead from each state to the same state are one class (Dang and Ermon, arXiv 2607.07026).
"""

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.canvas import BoolArray, IntArray
from ..core.child import limit
from ..core.errors import ConfigError, one_line
from .byte_automaton import (
    DEPTH,
    MOST_STEPS,
    Budget,
    ByteAutomaton,
    Empty,
    TooLarge,
    Unfit,
    combined,
    distances,
    ranges,
)
from .expressions import TEXT, regex_part
from .grammar import Grammar
from .parts import Bytes, Either, Leaf, Letters, Part, Repeat, Row, automaton_of, shortest
from .plain import plain
from .reading import Reader
from .source import Source, encoded, named

HashArray = npt.NDArray[np.uint64]

MOST_STATES = 30_000  # of an automaton over tokens
MOST_EDGES = 1_500_000
MOST_CELLS = 40_000_000  # states times classes
MEMORY = 4 << 30  # bytes
FRAMES = 2000  # of calls within calls: what is nested 200 deep takes over 1,000
MOST_LOOKUPS = 300_000_000  # where a byte leads from a state
ROOM = 1 << 21  # of these at once
FEW = 64  # longest tokens, which are followed one by one
STAY = 256  # as a byte: none


@dataclass(frozen=True)
class Level:
    """Prefixes of a vocabulary, one byte longer than those of the level before: the index of each
    one's ``parent`` there, the ``bytes`` (n, 1) behind it, and the ``tokens`` that end in them with
    the indices of their ``nodes``.  The last level has the longest tokens, fewer than `FEW`,
    with all ``bytes`` (n, k) that are left of them; behind those of the shorter ones is `STAY`."""

    parent: IntArray
    bytes: IntArray
    tokens: IntArray
    nodes: IntArray


def prefix_tree(pieces: Sequence[bytes | None]) -> list[Level]:
    """All prefixes of a vocabulary, by their length."""
    known = sorted((len(piece), token, piece) for token, piece in enumerate(pieces) if piece)
    size = known[-FEW][0] if len(known) >= FEW else 0
    index: list[dict[bytes, int]] = [{b"": 0}, *({} for _ in range(size))]
    ends: list[list[tuple[int, int]]] = [[] for _ in index]
    last: list[tuple[int, int, bytes]] = []
    for length, token, piece in known:
        for n in range(1, min(length, size) + 1):
            node = index[n].setdefault(piece[:n], len(index[n]))
        if length > size:
            last.append((token, node if size else 0, piece[size:]))
        else:
            ends[length].append((token, node))
    levels = []
    for n in range(1, size + 1):
        parent = [index[n - 1][prefix[:-1]] for prefix in index[n]]
        behind = [[prefix[-1]] for prefix in index[n]]
        tokens, nodes = np.array(ends[n], np.int64).reshape(-1, 2).T
        levels.append(Level(np.array(parent), np.array(behind), tokens, nodes))
    if last:
        longest = max(len(rest) for _, _, rest in last)
        behind = [[*rest, *[STAY] * (longest - len(rest))] for _, _, rest in last]
        at = np.arange(len(last))
        tokens, parent = np.array([each[:2] for each in last]).T
        levels.append(Level(parent, np.array(behind), tokens, at))
    return levels


class Compiler:
    """Reads one structure.  ``spells`` and ``ignored`` are those of `values.Base`."""

    def __init__(self, budget: Budget, spells: bool = False) -> None:
        self.budget, self.spells = budget, spells
        self.ignored: dict[str, None] = {}

    def part(self, source: Mapping[str, Any]) -> Part:
        """The texts of a source: plain data, see `dllm.structured.source`.  Raises `ConfigError`,
        `Unfit`."""
        ((kind, value),) = source.items()
        if kind == "regex":
            return regex_part(value)
        if kind == "choice":
            return Either(tuple(Bytes(text.encode()) for text in value))
        if kind in ("row", "either"):
            parts = tuple(map(self.part, value))
            return Row(parts) if kind == "row" else Either(parts)
        if kind == "repeat":
            return Repeat(self.part(value[0]), value[1], value[2])
        if kind == "grammar":
            return Grammar(value, self.budget).part()
        if kind == "free":
            return Leaf(self._free(value))
        reader = Reader(value, self.budget, loose=kind == "open_schema")
        reader.spells, reader.ignored = self.spells, self.ignored
        return reader.read()

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
        # Further tries take less, so that all of them together end soon.
        compiler = Compiler(Budget(MOST_STEPS // (1 if depth == DEPTH else 4), depth))
        try:
            automaton = automaton_of(compiler.part(source), compiler.budget)
            if len(automaton.edges) <= MOST_STATES:
                return automaton, list(compiler.ignored)
            failed = failed or TooLarge(f"has more than {MOST_STATES:,} states: allow less")
        except TooLarge as error:
            failed = failed or error
        except RecursionError:
            failed = failed or TooLarge("is nested too deeply: allow less")
        except Empty:  # there may be a text that is deeper
            if failed is None:
                raise
            break
        if not compiler.budget.cut:
            break
    assert failed is not None
    raise failed


def with_blank(automaton: ByteAutomaton) -> tuple[IntArray, BoolArray]:
    """(S + 2, 256) next states, (S + 1,) which accept.  The state before the dead one is the
    start, where a blank that comes first counts for nothing."""
    table, size = automaton.table().astype(np.int64), len(automaton.edges)
    table[table == size] = size + 1
    stripped = table[0].copy()
    stripped[0x20] = 0
    table = np.vstack([table[:-1], stripped, table[-1:]])
    ends = np.array(automaton.accepting)
    return table, np.append(ends, ends[0])


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
    ignored: tuple[str, ...]


class Rows(NamedTuple):
    """What prefixes do, side by side: a key (n,) each and its first entry, ``first`` (n + 1,); per
    entry the state it leads from, and where."""

    keys: HashArray
    first: IntArray
    state: IntArray
    target: IntArray

    def some(self, rows: IntArray) -> "Rows":
        """Some of them."""
        sizes = np.diff(self.first)[rows]
        at = ranges(self.first[rows], sizes)
        return Rows(self.keys[rows], np.append(0, sizes.cumsum()), self.state[at], self.target[at])


class Moves:
    """Where each token leads from each state.  ``keys`` (V,): equal for tokens that lead from each
    state to the same state, 0 for those that lead nowhere; ``rows``: what tokens of each key do.

    Prefixes that lead from each state to the same state are followed as one.
    """

    def __init__(self, table: IntArray, tokens: int, tree: Sequence[Level]) -> None:
        self.table = np.hstack([table, np.arange(len(table))[:, None]])  # `STAY` behind the bytes
        self.keys, states = np.zeros(tokens, np.uint64), np.arange(len(table) - 1)
        self._left, random = MOST_LOOKUPS, np.random.default_rng(1)
        self._source, self._target = random.integers(1, 2**63, (2, len(states)), np.uint64)
        rows = Rows(np.zeros(1, np.uint64), np.array([0, len(states)]), states, states)
        row, found = np.zeros(1, np.int64), list[Rows]()  # of each prefix, in ``rows``
        for level in tree:
            parent = row[level.parent]
            live = np.flatnonzero(parent >= 0)
            asked = (
                parent[live] * STAY + level.bytes[live, 0] if level.bytes.shape[1] == 1 else live
            )
            _, first, which = np.unique(asked, return_index=True, return_inverse=True)
            some = live[first]
            place, rows = self._behind(rows, parent[some], level.bytes[some])
            row = np.full(len(parent), -1)
            row[live] = place[which]
            here = row[level.nodes]
            self.keys[level.tokens[here >= 0]] = rows.keys[here[here >= 0]]
            found.append(rows.some(np.unique(here[here >= 0])))
        self.rows = _joined(found)

    def sign(self, state: IntArray, target: IntArray) -> HashArray:
        """A number (n,) for each state and where it is left to."""
        signs: HashArray = self._source[state] * self._target[target]
        return signs

    def _behind(self, rows: Rows, row: IntArray, more: IntArray) -> tuple[IntArray, Rows]:
        """What ``more`` bytes (n, k) do behind each ``row`` (n,): the place (n,) of each among the
        rows that come of it, -1 for nothing."""
        sizes = np.diff(rows.first)[row]
        self._left -= int(sizes.sum()) * more.shape[1]
        if self._left < 0:
            raise TooLarge(f"takes more than {MOST_LOOKUPS:,} look-ups to compile: allow less")
        keys, parts = np.zeros(len(row), np.uint64), list[Rows]()
        cuts = np.flatnonzero(np.diff(sizes.cumsum() // ROOM)) + 1
        for here in np.split(np.arange(len(row)), cuts):
            behind = rows.some(row[here])
            target, which = behind.target, np.repeat(here, sizes[here])
            for byte in more.T:
                target = self.table[target, byte[which]]
            alive = np.flatnonzero(target != len(self.table) - 1)
            first = np.searchsorted(alive, behind.first)
            state, target = behind.state[alive], target[alive]
            total = np.append(np.uint64(0), self.sign(state, target).cumsum())
            keys[here] = np.diff(total[first])
            each = Rows(keys[here], first, state, target)
            parts.append(each.some(np.unique(each.keys, return_index=True)[1]))
        after = _joined(parts)
        return np.where(keys > 0, np.searchsorted(after.keys, keys), -1), after


def _joined(parts: Sequence[Rows]) -> Rows:
    """Several together, in the order of their keys, each once and without that of nothing."""
    keys, state, target = (np.concatenate([part[i] for part in parts]) for i in (0, 2, 3))
    sizes = np.concatenate([np.diff(part.first) for part in parts])
    every = Rows(keys, np.append(0, sizes.cumsum()), state, target)
    values, order = np.unique(keys, return_index=True)
    return every.some(order[values > 0])


def compile_tokens(
    source: Mapping[str, Any], pieces: Sequence[bytes | None], tree: list[Level]
) -> Tables:
    """The automaton of ``source`` over a vocabulary: states that tokens lead to and out of, and
    classes of tokens that differ there, in the order of their first tokens.

    Raises `ConfigError` for one that is not understood, `Unfit` beyond the limits.
    """
    automaton, ignored = byte_automaton(source)
    table, accepting = with_blank(automaton)
    states, starts = len(accepting), [0, len(accepting) - 1]
    moves = Moves(table, len(pieces), tree)
    rows = moves.rows
    arcs = np.stack(np.divmod(np.unique(rows.state * states + rows.target), states))
    kept = distances(arcs, np.array(starts), states) >= 0
    kept &= distances(arcs[::-1], np.flatnonzero(accepting), states) >= 0
    if not kept[starts].all():
        raise Unfit("allows no text that the tokens of the model can spell")
    label = np.repeat(np.arange(len(rows.keys)), np.diff(rows.first))
    live = kept[rows.state] & kept[rows.target]
    label, begin, end = label[live], rows.state[live], rows.target[live]
    keys = np.zeros(len(rows.keys), np.uint64)
    np.add.at(keys, label, moves.sign(begin, end))
    # What a token does among the states that are kept.
    of = np.searchsorted(rows.keys, moves.keys)
    key = np.where(moves.keys > 0, np.append(keys, np.uint64(0))[of], np.uint64(0))
    values, first, of = np.unique(key, return_index=True, return_inverse=True)
    number = np.full(len(values), -1)
    order = np.argsort(first[values > 0], kind="stable") + int(values[0] == 0)
    number[order] = np.arange(len(order))
    column = number[np.searchsorted(values, keys)]
    rank = np.where(kept, np.cumsum(kept) - 1, -1)
    if int(kept.sum()) * len(order) > MOST_CELLS:
        raise TooLarge(f"has {states:,} states and {len(order):,} classes of tokens: allow less")
    follow = np.full((int(kept.sum()), len(order)), -1, np.int32)
    follow[rank[begin], column[label]] = rank[end]
    edges = int((follow >= 0).sum())
    if edges > MOST_EDGES:
        raise TooLarge(f"has {edges:,} edges, at most {MOST_EDGES:,} are taken: allow less")
    return Tables(
        number[of], follow, accepting[kept], int(rank[starts[0]]), int(rank[starts[1]]),
        tuple(ignored),
    )  # fmt: skip


class Refused(NamedTuple):
    """Why a source has no automaton.  ``shortest``: a text of it; ``source``: the same texts, as
    JSON, in words that every dialect reads alike; None where there is none."""

    why: str
    shortest: bytes | None = None
    source: str | None = None


def refused(why: str, source: Source) -> Refused:
    """With what a judge is told of a source that can be read."""
    same = text = None
    with contextlib.suppress(RecursionError, AttributeError, TypeError, ValueError):
        same = encoded(plain(source))
        compiler = Compiler(Budget(depth=1), spells=True)
        text = shortest(compiler.part(source), compiler.budget)
    return Refused(why, text, same)


# -- what the process does ----------------------------------------------------------------------

_TREES: dict[str, tuple[Sequence[bytes | None], list[Level]]] = {}  # by the keys of vocabularies


def keep_vocabulary(key: str, pieces: Sequence[bytes | None], seconds: float) -> None:
    """Keep a vocabulary."""
    limit(seconds, MEMORY)
    _TREES[key] = pieces, prefix_tree(pieces)


def compiled(text: str, key: str, seconds: float) -> Tables | Refused | None:
    """The automaton of a source, as JSON, over a vocabulary; None for one that is not known."""
    if key not in _TREES:
        return None
    limit(seconds, MEMORY)
    sys.setrecursionlimit(FRAMES)
    source = json.loads(text)
    try:
        return compile_tokens(source, *_TREES[key])
    except ConfigError as error:
        return refused(str(error), source)
    except ValueError as error:
        has = "" if isinstance(error, Unfit) else "is not well formed: "
        return refused(f"{named(source)} {has}{one_line(error)}", source)
    except MemoryError:
        return Refused(f"{named(source)} takes more than {MEMORY >> 30} GB to compile: allow less")
