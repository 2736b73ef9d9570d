"""Regular languages over bytes: parts that are put together, and the automaton of what they spell.

A part is built in front of what follows it, once for each such continuation.  What two
alternatives have in common behind them is therefore one piece of the automaton, and the optional
properties of an object take states in proportion to their number, not to that of their subsets.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

MOST_STEPS = 1_500_000  # nodes, edges and pairs of states that one structure may take
MOST_STATES = 40_000  # of an automaton over bytes, before it is minimal
TOP = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
MERGED = 64  # states of a loop that is compared with others

Edge = tuple[int, int, int]  # the first and the last byte, and the state they lead to
Ranges = tuple[tuple[int, int], ...]  # of code points, ascending and apart


Copies = list[tuple["Leaf", npt.NDArray[np.int64]]]  # of a leaf, and the states of each copy


class Unfit(ValueError):
    """A structure that is understood, and cannot be used."""


class TooLarge(Unfit):
    """One beyond a limit."""


class Budget:
    """Steps that are left.  They are counted: what is taken does not depend on the machine."""

    def __init__(self, steps: int = MOST_STEPS) -> None:
        self.steps = self.left = steps

    def spend(self, steps: int = 1) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooLarge(f"takes more than {self.steps:,} steps to compile: allow less")


class Part:
    """What may be written at a place."""

    def build(self, net: Net, then: int) -> int:
        """The node in which the part begins, where ``then`` is the node behind it."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Bytes(Part):
    """Just these."""

    data: bytes

    def build(self, net: Net, then: int) -> int:
        for byte in reversed(self.data):
            then = net.node([(byte, byte, then)])
        return then


@dataclass(frozen=True, eq=False)
class Letters(Part):
    """One character, in UTF-8."""

    ranges: Ranges

    def build(self, net: Net, then: int) -> int:
        edges: list[Edge] = []
        rests: dict[tuple[tuple[int, int], ...], int] = {(): then}

        def rest(sequence: tuple[tuple[int, int], ...]) -> int:
            if sequence not in rests:
                rests[sequence] = net.node([(*sequence[0], rest(sequence[1:]))])
            return rests[sequence]

        for low, high in self.ranges:
            for sequence in utf8(low, high):
                edges.append((*sequence[0], rest(sequence[1:])))
        return net.node(edges)


@dataclass(frozen=True, eq=False)
class Row(Part):
    """One part behind the other."""

    parts: tuple[Part, ...]

    def build(self, net: Net, then: int) -> int:
        for part in reversed(self.parts):
            then = net.build(part, then)
        return then


@dataclass(frozen=True, eq=False)
class Either(Part):
    """One of several; none of none."""

    parts: tuple[Part, ...]

    def build(self, net: Net, then: int) -> int:
        return net.fork([net.build(part, then) for part in self.parts])


@dataclass(frozen=True, eq=False)
class Repeat(Part):
    """A part ``least`` times or more, up to ``most`` times; None: without end."""

    part: Part
    least: int
    most: int | None

    def build(self, net: Net, then: int) -> int:
        if self.most is None:
            loop = net.fork([then])
            net.free[loop].append(net.build(self.part, loop))
            then = loop
        for _ in range((self.most or self.least) - self.least):
            then = net.fork([then, net.build(self.part, then)])
        for _ in range(self.least):
            then = net.build(self.part, then)
        return then


@dataclass(frozen=True, eq=False)
class Members(Part):
    """Members in their order, some of which may be left out, with a ``comma`` between them:
    ``least`` to ``most`` in number."""

    members: tuple[tuple[Part, bool], ...]  # and whether one is needed
    comma: Part
    least: int = 0
    most: int | None = None

    def build(self, net: Net, then: int) -> int:
        top = max(self.least, 1) if self.most is None else self.most
        capped = self.most is None
        nothing = net.node([])
        ends = [then if n >= self.least else nothing for n in range(top + 1)]
        for part, needed in reversed(self.members):
            starts = []
            for n in range(top + 1):
                if n == top and not capped:
                    here = nothing
                else:
                    here = net.build(part, ends[min(n + 1, top)])
                    here = net.build(self.comma, here) if n else here
                starts.append(here if needed else net.fork([here, ends[n]]))
            ends = starts
        return ends[0]


@dataclass(frozen=True, eq=False)
class Leaf(Part):
    """What a minimal automaton accepts.  Its copies are known as such, so that the vocabulary is
    walked once for all of them."""

    automaton: ByteAutomaton

    def build(self, net: Net, then: int) -> int:
        automaton, low = self.automaton, len(net.edges)
        for state, edges in enumerate(automaton.edges):
            net.node([(first, last, low + target) for first, last, target in edges])
            if automaton.accepting[state]:
                net.free[-1].append(then)
        net.copies.append((self, low))
        return low + automaton.start


class Net:
    """Nodes with ``edges`` over bytes and ``free`` ones; ``copies``: leaves and the first of their
    nodes."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.edges: list[list[Edge]] = []
        self.free: list[list[int]] = []
        self.copies: list[tuple[Leaf, int]] = []
        self._built: dict[tuple[Part, int], int] = {}

    def node(self, edges: list[Edge]) -> int:
        self.budget.spend(1 + len(edges))
        self.edges.append(edges)
        self.free.append([])
        return len(self.edges) - 1

    def fork(self, nodes: list[int]) -> int:
        node = self.node([])
        self.budget.spend(len(nodes))
        self.free[node] += nodes
        return node

    def build(self, part: Part, then: int) -> int:
        key = part, then
        if key not in self._built:
            self._built[key] = part.build(self, then)
        return self._built[key]


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """Per state its ``edges``, ascending and apart, and whether it is ``accepting``; ``start``.
    ``copies``: per leaf that was built in, the states (copies, states of the leaf) that stand for
    its own, -1 where none does."""

    edges: list[list[Edge]]
    accepting: list[bool]
    start: int
    copies: Copies = field(default_factory=list)

    def table(self) -> np.ndarray:
        """(S + 1, 256) next states, the last state being dead."""
        dead = len(self.edges)
        table = np.full((dead + 1, 256), dead, np.int32)
        for state, edges in enumerate(self.edges):
            for low, high, target in edges:
                table[state, low : high + 1] = target
        return table

    def accepts(self, text: bytes) -> bool:
        state: int | None = self.start
        for byte in text:
            state = next((t for a, b, t in self.edges[state or 0] if a <= byte <= b), None)
            if state is None:
                return False
        return self.accepting[state or 0]

    @functools.cached_property
    def empty(self) -> bool:
        """Whether it accepts nothing."""
        return not any(self.accepting)


def utf8(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The code points of a range as rows of ranges of bytes."""
    for edge in (0x7F, 0x7FF, 0xFFFF):
        if low <= edge < high:
            yield from utf8(low, edge)
            yield from utf8(edge + 1, high)
            return
    if low <= SURROGATES[1] and high >= SURROGATES[0]:
        if low < SURROGATES[0]:
            yield from utf8(low, SURROGATES[0] - 1)
        if high > SURROGATES[1]:
            yield from utf8(SURROGATES[1] + 1, high)
        return
    if high <= 0x7F:
        yield ((low, high),)
        return
    for bits in (6, 12, 18):
        mask = (1 << bits) - 1
        if low >> bits != high >> bits:
            if low & mask:
                yield from utf8(low, low | mask)
                yield from utf8((low | mask) + 1, high)
                return
            if high & mask != mask:
                yield from utf8(low, (high & ~mask) - 1)
                yield from utf8(high & ~mask, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


def automaton_of(part: Part, budget: Budget) -> ByteAutomaton:
    """The automaton of what a part spells.  Raises `Unfit` where that is nothing, `TooLarge`."""
    net = Net(budget)
    end = net.node([])
    try:
        start = net.build(part, end)
    except RecursionError:
        raise TooLarge("is nested too deeply") from None
    return minimal(*_determined(net, start, end), budget)


def _determined(net: Net, start: int, end: int) -> tuple[list[list[Edge]], list[bool], Copies]:
    """Sets of nodes as states, the first of which is the start."""
    budget, nodes = net.budget, net.edges
    near: dict[int, frozenset[int]] = {}

    def around(node: int) -> frozenset[int]:
        """What free edges lead to, as far as it counts."""
        if node not in near:
            if not net.free[node]:
                near[node] = frozenset([node] if nodes[node] or node == end else [])
                return near[node]
            seen, todo = {node}, [node]
            while todo:
                for other in net.free[todo.pop()]:
                    if other not in seen:
                        seen.add(other)
                        todo.append(other)
            budget.spend(len(seen))
            near[node] = frozenset(n for n in seen if nodes[n] or n == end)
        return near[node]

    first = around(start)
    number: dict[frozenset[int], int] = {first: 0}
    known: dict[frozenset[int], int] = {}
    states, rows = [first], list[list[Edge]]()
    for state in states:  # which grows
        row: list[Edge] = []
        for low, high, targets in _split([edge for node in state for edge in nodes[node]]):
            to = known.get(targets)
            if to is None:
                here = frozenset().union(*map(around, targets))
                to = number.setdefault(here, len(states))
                known[targets] = to
                if to == len(states):
                    states.append(here)
                    if len(states) > MOST_STATES:
                        raise TooLarge(f"has more than {MOST_STATES:,} states: allow less")
                budget.spend(len(here))
            if row and row[-1][1] == low - 1 and row[-1][2] == to:
                row[-1] = row[-1][0], high, to
            else:
                row.append((low, high, to))
        budget.spend(1 + len(row))
        rows.append(row)
    single = {next(iter(s)): i for i, s in enumerate(states) if len(s) == 1}
    copies: dict[Leaf, list[list[int]]] = {}
    for leaf, low in net.copies:
        here_ = [single.get(low + i, -1) for i in range(len(leaf.automaton.edges))]
        copies.setdefault(leaf, []).append(here_)
    each = [(leaf, np.array(where)) for leaf, where in copies.items()]
    return rows, [end in state for state in states], each


def _split(edges: list[Edge]) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Edges that may overlap as ranges of bytes that do not, with all that each leads to."""
    if len(edges) == 1:
        yield edges[0][0], edges[0][1], frozenset([edges[0][2]])
        return
    events: list[tuple[int, int, int]] = []
    for low, high, target in edges:
        events += (low, 1, target), (high + 1, -1, target)
    events.sort()
    active: dict[int, int] = {}
    last = 0
    for at, change, target in events:
        if at > last and active:
            yield last, at - 1, frozenset(active)
        last = at
        count = active.get(target, 0) + change
        if count:
            active[target] = count
        else:
            active.pop(target, None)


def minimal(
    rows: list[list[Edge]], accepting: list[bool], copies: Copies,
    budget: Budget, start: int = 0,
) -> ByteAutomaton:  # fmt: skip
    """The same language in fewest states, as far as loops of more than `MERGED` states are equal
    within themselves.  Whatever leads on is numbered before what leads to it."""
    dead = -1
    became = [dead] * len(rows)
    edges: list[list[Edge]] = []
    final: list[bool] = []
    known: dict[object, int] = {}

    def added(row: list[Edge], accepts: bool) -> int:
        edges.append(row)
        final.append(accepts)
        return len(edges) - 1

    for group in _components(rows):
        budget.spend(sum(len(rows[state]) for state in group))
        members = set(group)
        if len(group) == 1:
            (state,) = group
            row = _mapped(rows[state], {state: -2}, became)
            useful = accepting[state] or any(target >= 0 for _, _, target in row)
            if useful:
                key = (accepting[state], *row)
                if key not in known:
                    known[key] = new = added([], accepting[state])
                    edges[new] = [(a, b, new if t == -2 else t) for a, b, t in row]
                became[state] = known[key]
            continue
        leads = any(
            accepting[s] or any(t not in members and became[t] >= 0 for _, _, t in rows[s])
            for s in group
        )
        if not leads:
            continue
        classes = _refined(group, rows, accepting, became)
        first: dict[int, int] = {}
        for state in group:
            first.setdefault(classes[state], state)
        within = {state: -2 - classes[state] for state in group}
        inner = {c: _mapped(rows[s], within, became) for c, s in first.items()}
        signs: dict[int, object] = {}
        if len(inner) <= MERGED:
            signs = {c: _signature(c, inner, {c: accepting[s] for c, s in first.items()})
                     for c in inner}  # fmt: skip
        where: dict[int, int] = {}
        for c, state in first.items():
            sign = signs.get(c)
            if sign is not None and sign in known:
                where[c] = known[sign]
            else:
                where[c] = added([], accepting[state])
                if sign is not None:
                    known[sign] = where[c]
        for c, row in inner.items():
            new = where[c]
            if not edges[new]:
                edges[new] = [(a, b, where[-2 - t] if t <= -2 else t) for a, b, t in row]
        for state in group:
            became[state] = where[classes[state]]
    if became[start] < 0:
        raise Unfit("allows no text")
    mapping = np.array([*became, dead])
    return ByteAutomaton(edges, final, became[start], [(leaf, mapping[at]) for leaf, at in copies])


def _mapped(row: list[Edge], inner: dict[int, int], became: list[int]) -> list[Edge]:
    """Edges whose targets have become others, without those to -1, neighbours made one."""
    result: list[Edge] = []
    for low, high, target in row:
        new = inner.get(target, became[target])
        if new == -1:
            continue
        if result and result[-1][1] == low - 1 and result[-1][2] == new:
            result[-1] = result[-1][0], high, new
        else:
            result.append((low, high, new))
    return result


def _components(rows: list[list[Edge]]) -> Iterator[list[int]]:
    """Loops of states, and single states; what leads on comes before what leads to it (Tarjan)."""
    index, low = [0] * len(rows), [0] * len(rows)
    on = [False] * len(rows)
    stack: list[int] = []
    count = 0
    for root in range(len(rows)):
        if index[root]:
            continue
        work: list[tuple[int, Iterator[int]]] = []
        enter = root
        while True:
            if enter >= 0:
                count += 1
                index[enter] = low[enter] = count
                stack.append(enter)
                on[enter] = True
                work.append((enter, iter([target for _, _, target in rows[enter]])))
                enter = -1
            state, targets = work[-1]
            for target in targets:
                if not index[target]:
                    enter = target
                    break
                if on[target]:
                    low[state] = min(low[state], index[target])
            if enter >= 0:
                continue
            work.pop()
            if work:
                low[work[-1][0]] = min(low[work[-1][0]], low[state])
            if low[state] == index[state]:
                group = []
                while True:
                    member = stack.pop()
                    on[member] = False
                    group.append(member)
                    if member == state:
                        break
                yield group
            if not work:
                break


def _refined(
    group: list[int], rows: list[list[Edge]], accepting: list[bool], became: list[int]
) -> dict[int, int]:
    """Which states of a loop accept the same texts: a class of each, from 0 (Moore)."""
    rank = {state: i for i, state in enumerate(group)}
    size = len(group)
    table = np.full((size, 256), -1, np.int64)
    for i, state in enumerate(group):
        for low, high, target in rows[state]:
            if target in rank:
                table[i, low : high + 1] = rank[target]
            elif became[target] >= 0:
                table[i, low : high + 1] = became[target] + size
    table = np.unique(table, axis=1)  # bytes that act alike
    inside = (table >= 0) & (table < size)
    at = np.where(inside, table, 0)
    ends = np.array([accepting[state] for state in group], np.int64)
    classes = _named(np.column_stack([ends, np.where(inside, -2, table)]))
    count = int(classes.max()) + 1
    while True:
        classes = _named(np.column_stack([classes, np.where(inside, classes[at], -1)]))
        if int(classes.max()) + 1 == count:
            return dict(zip(group, classes.tolist(), strict=True))
        count = int(classes.max()) + 1


def _named(rows: np.ndarray) -> np.ndarray:
    """(n,) a number per row of an array, equal for equal rows, from 0."""
    number: dict[bytes, int] = {}
    return np.array([number.setdefault(row.tobytes(), len(number)) for row in rows])


def _signature(
    root: int, inner: dict[int, list[Edge]], accepting: dict[int, bool]
) -> tuple[object, ...]:
    """A loop as it is seen from one of its states: equal where the texts from there are."""
    number, order = {root: 0}, [root]
    result: list[object] = []
    for c in order:  # which grows
        result.append(accepting[c])
        for low, high, target in inner[c]:
            if target <= -2:
                if -2 - target not in number:
                    number[-2 - target] = len(order)
                    order.append(-2 - target)
                target = -2 - number[-2 - target]
            result += low, high, target
    return tuple(result)


def combined(
    a: ByteAutomaton, b: ByteAutomaton, budget: Budget, without: bool = False
) -> ByteAutomaton:
    """The texts that both accept; ``without``: those that only the first does.  Raises `Unfit`
    where there are none."""
    number, pairs, rows = {(a.start, b.start): 0}, [(a.start, b.start)], list[list[Edge]]()
    for x, y in pairs:  # which grows
        mine = [(low, high, target) for low, high, target in a.edges[x]]
        other = [(low, high, -1 - target) for low, high, target in b.edges[y]] if y >= 0 else []
        row: list[Edge] = []
        for low, high, targets in _split(mine + other):
            left = next((t for t in targets if t >= 0), -1)
            right = next((-1 - t for t in targets if t < 0), -1)
            if left < 0 or (right < 0 and not without):
                continue
            to = number.setdefault((left, right), len(pairs))
            if to == len(pairs):
                pairs.append((left, right))
            row.append((low, high, to))
        budget.spend(1 + len(row))
        if len(pairs) > MOST_STATES:
            raise TooLarge(f"has more than {MOST_STATES:,} states: allow less")
        rows.append(row)
    ends = [a.accepting[x] and (y >= 0 and b.accepting[y]) != without for x, y in pairs]
    return minimal(rows, ends, [], budget)


def erased(automaton: ByteAutomaton, byte: int, budget: Budget) -> ByteAutomaton:
    """The same texts with each ``byte`` left out."""
    net = Net(budget)
    end = net.node([])
    low = len(net.edges)
    for edges, accepts in zip(automaton.edges, automaton.accepting, strict=True):
        row: list[Edge] = []
        free = [end] if accepts else []
        for first, last, target in edges:
            sides = (first, min(last, byte - 1)), (max(first, byte + 1), last)
            row += [(a, b, low + target) for a, b in sides if a <= b]
            free += [low + target] if first <= byte <= last else []
        net.free[net.node(row)] += free
    return minimal(*_determined(net, low + automaton.start, end), budget)


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges of code points, ascending and apart."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = result[-1][0], max(high, result[-1][1])
        else:
            result.append((low, high))
    return tuple(result)


def inverse(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """All other code points."""
    result, low = [], 0
    for first, last in ranges:
        if first > low:
            result.append((low, first - 1))
        low = last + 1
    return (*result, (low, TOP)) if low <= TOP else tuple(result)


def both(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> Ranges:
    """What lies in both."""
    return union(
        (max(low, first), min(high, last))
        for low, high in a for first, last in b if max(low, first) <= min(high, last)
    )  # fmt: skip


EMPTY = Bytes(b"")


def maybe(part: Part) -> Part:
    return Either((part, EMPTY))
