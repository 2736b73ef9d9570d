"""Regular languages over bytes: parts that are put together, and the automaton of what they spell.

A part is built in front of what follows it, once for each such continuation.  What two
alternatives have in common behind them is therefore one piece of the automaton, and the optional
properties of an object take states in proportion to their number, not to that of their subsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .byte_automaton import Budget, ByteAutomaton, Edge, determined

TOP = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]  # of code points, ascending and apart


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
    """One character, in UTF-8; no surrogate, which has none."""

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
        end = then  # where it stops: not behind the next one, or that would lead to all others
        for _ in range((self.most or self.least) - self.least):
            then = net.fork([end, net.build(self.part, then)])
        for _ in range(self.least):
            net.budget.spend()  # also where the part takes no node
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
    needed once; ``ordered``: these in their own order.  The first ``once`` of all differ.
    ``again``: all of them may stand again, and what it names in place of some, which are needed
    behind it."""

    members: tuple[tuple[Part, bool], ...]  # and whether one is needed
    comma: Part
    least: int
    most: int | None
    ordered: bool = False
    once: int = 0
    again: Mapping[int, Part] | None = None

    def build(self, net: Net, then: int) -> int:
        top = max(self.least, 1) if self.most is None else self.most
        again = self.again or {}
        ways = [(i, part, need, True) for i, (part, need) in enumerate(self.members)]
        ways += [(i, part, False, False) for i, part in again.items()]
        needed = [i for i, _, need, good in ways if need or not good]
        begin = frozenset(again).difference(i for i, _, need, _ in ways if need)
        number = {(begin, 0): net.node([])}  # what is right, and how many are there
        for there, n in (order := [*number]):  # which grows
            node, missing = number[there, n], [i for i in needed if i not in there]
            if not missing and n >= self.least:
                net.free[node].append(then)
            for i, part, need, good in ways:
                early = need and self.ordered and i not in missing[:1]
                twice = i in there and self.again is None
                if twice or early or (n == top and self.most is not None):
                    continue
                kept = range(len(self.members)) if n + 1 < self.once else needed
                after = (there | {i} if good else there - {i}).intersection(kept), min(n + 1, top)
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
        return low


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


def utf8(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """The code points of a range without surrogates as rows of ranges of bytes."""
    for edge in (0x7F, 0x7FF, 0xFFFF):
        if low <= edge < high:
            yield from utf8(low, edge)
            yield from utf8(edge + 1, high)
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
    start = net.build(part, end)
    return determined(net.edges, net.free, start, end, budget)


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
    return determined(net.edges, net.free, low, end, budget)


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
    result, low = [], 0
    for first, last in ranges:
        if first > low:
            result.append((low, first - 1))
        low = last + 1
    return (*result, (low, TOP)) if low <= TOP else tuple(result)


def both(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> Ranges:
    return union(
        (max(low, first), min(high, last))
        for low, high in a for first, last in b if max(low, first) <= min(high, last)
    )  # fmt: skip


EMPTY = Bytes(b"")


def maybe(part: Part) -> Part:
    return Either((part, EMPTY))
