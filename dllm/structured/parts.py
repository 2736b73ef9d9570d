"""Regular languages over bytes: parts that are put together, and the automaton of what they spell.

A part is built in front of what follows it, once for each such continuation.  What two
alternatives have in common behind them is therefore one piece of the automaton, and the optional
properties of an object take states in proportion to their number, not to that of their subsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MOST_STEPS = 1_500_000  # nodes, edges and pairs of states that one structure may take
MOST_STATES = 40_000  # of an automaton over bytes, before it is minimal
TOP = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)

Edge = tuple[int, int, int]  # the first and the last byte, and the state they lead to
Ranges = tuple[tuple[int, int], ...]  # of code points, ascending and apart

IntArray = npt.NDArray[np.int64]


class Unfit(ValueError):
    """A structure that is understood, and cannot be used."""


class Empty(Unfit):
    """One that no text has."""


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
class Mixed(Part):
    """Members in any order, with a ``comma`` between them: ``least`` to ``most``, those that are
    needed once, the others, too, if ``once``; ``ordered``: the needed ones in their own order."""

    members: tuple[tuple[Part, bool], ...]  # and whether one is needed
    comma: Part
    least: int
    most: int | None
    ordered: bool = False
    once: bool = False

    def build(self, net: Net, then: int) -> int:
        top = max(self.least, 1) if self.most is None else self.most
        needed = [i for i, (_, needed) in enumerate(self.members) if needed]
        number = {(frozenset[int](), 0): net.node([])}  # what is there, and how many
        for there, n in (order := [*number]):  # which grows
            node, missing = number[there, n], [i for i in needed if i not in there]
            if not missing and n >= self.least:
                net.free[node].append(then)
            for i, (part, need) in enumerate(self.members):
                early = need and self.ordered and i not in missing[:1]
                if i in there or early or (n == top and self.most is not None):
                    continue
                after = there | {i} if need or self.once else there, min(n + 1, top)
                if after not in number:
                    number[after] = net.node([])
                    order.append(after)
                here = net.build(part, number[after])
                net.free[node].append(net.build(self.comma, here) if n else here)
            net.budget.spend(len(self.members))
        return next(iter(number.values()))


@dataclass(frozen=True, eq=False)
class Leaf(Part):
    """What a minimal automaton accepts."""

    automaton: ByteAutomaton

    def build(self, net: Net, then: int) -> int:
        automaton, low = self.automaton, len(net.edges)
        for state, edges in enumerate(automaton.edges):
            net.node([(first, last, low + target) for first, last, target in edges])
            if automaton.accepting[state]:
                net.free[-1].append(then)
        return low + automaton.start


class Net:
    """Nodes with ``edges`` over bytes and ``free`` ones."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.edges: list[list[Edge]] = []
        self.free: list[list[int]] = []
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
    """Per state its ``edges``, ascending and apart, and whether it is ``accepting``; ``start``."""

    edges: list[list[Edge]]
    accepting: list[bool]
    start: int

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


def shortest(part: Part, budget: Budget) -> bytes | None:
    """A shortest text of a part, None where there is none.  Raises `TooLarge`."""
    net = Net(budget)
    end = net.node([])
    start = net.build(part, end)
    came: dict[int, tuple[int, int]] = {start: (-1, -1)}  # the node before, and the byte; -1: none
    level = [start]
    while level and end not in came:
        for node in level:  # which grows
            for other in net.free[node]:
                if other not in came:
                    came[other] = node, -1
                    level.append(other)
        after: list[int] = []
        for node in level:
            for low, high, other in net.edges[node]:
                if other not in came:
                    came[other] = node, min(max(low, ord("a")), high)
                    after.append(other)
        level = after
    text, node = bytearray(), end if end in came else start
    while node != start:
        node, byte = came[node]
        text += bytes([byte] * (byte >= 0))
    return bytes(text[::-1]) if end in came else None


def _determined(net: Net, start: int, end: int) -> tuple[list[list[Edge]], list[bool]]:
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
    return rows, [end in state for state in states]


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
    rows: list[list[Edge]], accepting: list[bool], budget: Budget, start: int = 0
) -> ByteAutomaton:
    """The same language in fewest states.  Raises `Unfit` where it is empty.

    Classes of states that may accept the same texts are split until none is left to split.  A
    state's edges have a sum of random numbers, by their bytes and the classes that they lead to:
    equal sums, equal edges.  A split looks again at states that lead to the smaller parts only.
    """
    size = len(rows)
    flat = [(s, a, b, t) for s, row in enumerate(rows) for a, b, t in row]
    edges = np.array(flat, np.int64).reshape(-1, 4)
    far = distances(edges[:, [3, 0]].T, np.flatnonzero(accepting), size)
    if far[start] < 0:
        raise Empty("allows no text")
    source, low, high, target = edges[far[edges[:, 3]] >= 0].T
    random = np.random.default_rng(1).integers(1, 2**63, 257 + size + 1, np.uint64)
    ahead = np.append(np.uint64(0), random[:256].cumsum(dtype=np.uint64))
    weight, random = ahead[high + 1] - ahead[low], random[256:]
    leaving = np.searchsorted(source, np.arange(size + 1))
    into = np.argsort(target, kind="stable")
    entering = np.searchsorted(target[into], np.arange(size + 1))
    # Equal states are equally far from an end.
    classes = 2 * far + np.array(accepting)
    classes = np.unique(classes, return_inverse=True)[1]
    count = int(classes.max()) + 1
    members = np.bincount(classes, minlength=size + 1)
    todo = np.flatnonzero(far >= 0)
    while todo.size:
        first = leaving[todo]
        sizes = leaving[todo + 1] - first
        at = ranges(first, sizes)
        budget.spend(1 + len(at) // 16)
        total = np.append(np.uint64(0), (weight[at] * random[classes[target[at]]]).cumsum())
        ends = sizes.cumsum()
        sums, mine = total[ends] - total[ends - sizes], classes[todo]
        order = np.lexsort((sums, mine))
        sums, mine = sums[order], mine[order]
        heads = np.append(True, mine[1:] != mine[:-1])
        new = heads | np.append(True, sums[1:] != sums[:-1])
        groups = np.diff(np.append(np.flatnonzero(new), len(mine)))
        owner, which = mine[new], heads.cumsum()[new] - 1
        # Of a class that is looked at as a whole, the largest part stays what it is.
        whole = np.diff(np.append(np.flatnonzero(heads), len(mine))) == members[mine[heads]]
        by_size = np.lexsort((-groups, which))
        largest = by_size[np.append(True, np.diff(which[by_size]) > 0)]
        stays = np.zeros(len(groups), np.bool_)
        stays[largest] = whole
        named = np.where(stays, owner, count + np.cumsum(~stays) - 1)
        count += int((~stays).sum())
        np.subtract.at(members, owner[~stays], groups[~stays])
        members[named[~stays]] = groups[~stays]
        classes[todo[order]] = np.repeat(named, groups)
        moved = todo[order][np.repeat(~stays, groups)]
        at = into[ranges(entering[moved], entering[moved + 1] - entering[moved])]
        todo = np.unique(source[at])
    return _renumbered(rows, accepting, np.where(far < 0, -1, classes).tolist(), start)


def _renumbered(
    rows: list[list[Edge]], accepting: list[bool], classes: list[int], start: int
) -> ByteAutomaton:
    """One state per class, in the order in which they are reached; without the class -1."""
    number, order, result = {classes[start]: 0}, [start], list[list[Edge]]()
    for state in order:  # which grows
        row: list[Edge] = []
        for low, high, target in rows[state]:
            which = classes[target]
            if which < 0:
                continue
            if which not in number:
                number[which] = len(order)
                order.append(target)
            if row and row[-1][1] == low - 1 and row[-1][2] == number[which]:
                row[-1] = row[-1][0], high, number[which]
            else:
                row.append((low, high, number[which]))
        result.append(row)
    return ByteAutomaton(result, [accepting[state] for state in order], 0)


def distances(arcs: IntArray, seeds: IntArray, size: int) -> IntArray:
    """(size,) how many arcs (2, A) lead to each state from the nearest of some; -1 for none."""
    order = np.argsort(arcs[0], kind="stable")
    target = arcs[1][order].tolist()
    bounds = np.searchsorted(arcs[0][order], np.arange(size + 1)).tolist()
    result = [-1] * size
    todo = seeds.tolist()
    for state in todo:
        result[state] = 0
    for state in todo:  # which grows
        for other in target[bounds[state] : bounds[state + 1]]:
            if result[other] < 0:
                result[other] = result[state] + 1
                todo.append(other)
    return np.array(result)


def ranges(first: IntArray, sizes: IntArray) -> IntArray:
    """Ranges of numbers side by side."""
    ends = sizes.cumsum()
    low: IntArray = np.repeat(first - ends + sizes, sizes)
    low += np.arange(len(low))
    return low


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
    return minimal(rows, ends, budget)


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
EVERYTHING = ByteAutomaton([[(0, 255, 0)]], [True], 0)


def maybe(part: Part) -> Part:
    return Either((part, EMPTY))
