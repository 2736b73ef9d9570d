"""Automata over bytes: made minimal, combined, and the limits that all of them share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.canvas import IntArray

DEPTH = 3  # of what contains itself, and of values of any kind
MOST_STEPS = 1_500_000  # nodes, edges and pairs of states that one structure may take
MOST_STATES = 40_000  # of an automaton over bytes, before it is minimal

Edge = tuple[int, int, int]  # the first and the last byte, and the state they lead to


class Unfit(ValueError):
    """A structure that is understood, and cannot be used."""


class Empty(Unfit):
    """One that no text has."""


class TooLarge(Unfit):
    """One beyond a limit."""


class Budget:
    """Steps that are left.  They are counted: what is taken does not depend on the machine.
    ``cut``: whether something would have gone on beyond its ``depth``."""

    def __init__(self, steps: int = MOST_STEPS, depth: int = DEPTH) -> None:
        self.steps = self.left = steps
        self.depth, self.cut = depth, False

    def within(self, least: int, most: int | None, limit: int) -> int | None:
        """How many may stand where a schema allows ``least`` to ``most``: in further tries no more
        than ``limit``, in each a quarter of those before."""
        self.cut |= most is not None and most > max(least, limit >> 4)
        if most is None or self.depth == DEPTH:
            return most
        return min(most, max(least, limit >> 2 * (DEPTH - 1 - self.depth)))

    def spend(self, steps: int = 1) -> None:
        self.left -= steps
        if self.left < 0:
            raise TooLarge(f"takes more than {self.steps:,} steps to compile: allow less")


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """Per state its ``edges``, ascending and apart, and whether it is ``accepting``; 0 begins."""

    edges: list[list[Edge]]
    accepting: list[bool]

    def table(self) -> np.ndarray:
        """(S + 1, 256) next states, the last state being dead."""
        dead = len(self.edges)
        table = np.full((dead + 1, 256), dead, np.int32)
        for state, edges in enumerate(self.edges):
            for low, high, target in edges:
                table[state, low : high + 1] = target
        return table

    def accepts(self, text: bytes) -> bool:
        state = 0
        for byte in text:
            state = next((t for a, b, t in self.edges[state] if a <= byte <= b), -1)
            if state < 0:
                return False
        return self.accepting[state]

    def texts(self, most: int) -> list[bytes]:
        """All texts, the shortest first; none where they are more than ``most``."""
        found, level = list[bytes](), [(0, b"")]
        while level and len(found) + len(level) <= most:
            found += [text for state, text in level if self.accepting[state]]
            level = [
                (to, text + bytes([byte])) for state, text in level
                for low, high, to in self.edges[state] for byte in range(low, high + 1)
            ]  # fmt: skip
        return [] if level else found


def determined(
    nodes: Sequence[list[Edge]], free: Sequence[list[int]], start: int, end: int, budget: Budget
) -> ByteAutomaton:
    """What leads from one of the ``nodes`` to another, along their edges and ``free`` ones.  Sets
    of nodes are states.  Raises `Unfit` where that is nothing, `TooLarge`."""
    near: dict[int, frozenset[int]] = {}

    def around(node: int) -> frozenset[int]:
        """What free edges lead to, as far as it counts."""
        if node not in near:
            if not free[node]:
                near[node] = frozenset([node] if nodes[node] or node == end else [])
                return near[node]
            seen, todo = {node}, [node]
            while todo:
                for other in free[todo.pop()]:
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
    return minimal(rows, [end in state for state in states], budget)


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


def minimal(rows: list[list[Edge]], accepting: list[bool], budget: Budget) -> ByteAutomaton:
    """The same language in fewest states.  Raises `Unfit` where it is empty.

    Classes of states that may accept the same texts are split until none is left to split.  A
    state's edges have a sum of random numbers, by their bytes and the classes that they lead to:
    equal sums, equal edges.  A split looks again at states that lead to the smaller parts only.
    """
    size = len(rows)
    flat = [(s, a, b, t) for s, row in enumerate(rows) for a, b, t in row]
    edges = np.array(flat, np.int64).reshape(-1, 4)
    far = distances(edges[:, [3, 0]].T, np.flatnonzero(accepting), size)
    if far[0] < 0:
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
    return _renumbered(rows, accepting, np.where(far < 0, -1, classes).tolist())


def _renumbered(rows: list[list[Edge]], accepting: list[bool], classes: list[int]) -> ByteAutomaton:
    """One state per class, in the order in which they are reached; without the class -1."""
    number, order, result = {classes[0]: 0}, [0], list[list[Edge]]()
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
    return ByteAutomaton(result, [accepting[state] for state in order])


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
    """The texts that both accept; ``without``: only the first does.  Raises `Unfit` for none."""
    number, pairs, rows = {(0, 0): 0}, [(0, 0)], list[list[Edge]]()
    for x, y in pairs:  # which grows
        other = [(low, high, -1 - target) for low, high, target in b.edges[y]] if y >= 0 else []
        row: list[Edge] = []
        for low, high, targets in _split(a.edges[x] + other):
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


EVERYTHING = ByteAutomaton([[(0, 255, 0)]], [True])
