"""An automaton over tokens: which texts a format allows, and how far from its end each state is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from ..core.canvas import BoolArray, IntArray
from ..kernels.statistics.classes import TokenClasses
from .byte_automaton import ranges
from .compiling import Tables


class Arcs:
    """Edges between the same two states as one, an arc (A,): ``source``, ``target`` and the set of
    its classes, ``label``.  Many arcs have equal sets: ``labels`` are the classes of all sets side
    by side, ``set_of_label`` the set each is in.  The first ``single`` sets have one class each;
    ``sets`` are where the others begin behind them.

    By source: ``first`` (k,) is the first arc of each of the ``sources`` that have any.
    """

    def __init__(self, follow: IntArray) -> None:
        """Those of a table (S, C) of next states."""
        size = len(follow)
        source, label = (follow >= 0).nonzero()
        pairs, arc = np.unique(source * size + follow[source, label], return_inverse=True)
        order = np.argsort(arc, kind="stable")
        number: dict[bytes, int] = {}
        which = np.array([
            number.setdefault(part.tobytes(), len(number))
            for part in np.split(label[order], np.searchsorted(arc[order], range(1, len(pairs))))
        ])  # fmt: skip
        members = [np.frombuffer(part, label.dtype) for part in number]
        by_size = sorted(range(len(members)), key=lambda i: len(members[i]))
        sizes = [len(members[i]) for i in by_size]
        self.labels = np.concatenate([members[i] for i in by_size])
        self.set_of_label = np.repeat(np.arange(len(sizes)), sizes)
        self.single = sizes.count(1)
        self.sets = np.cumsum([0, *sizes])[self.single : -1] - self.single
        source, target = np.divmod(pairs, size)
        self.source, self.target, self.label = source, target, np.argsort(by_size)[which]
        found, self.first = np.unique(source, return_index=True)
        self.sources: IntArray | slice = found if len(found) < size else slice(None)
        self._leaving = np.searchsorted(source, np.arange(size + 1))

    def leaving(self, states: IntArray) -> tuple[IntArray, IntArray]:
        """The arcs out of some ``states``, ascending, and the index of each one's source there."""
        first = self._leaving[states]
        sizes = self._leaving[states + 1] - first
        return ranges(first, sizes), np.repeat(np.arange(len(states)), sizes)


@dataclass(frozen=True, eq=False)
class Automaton:
    """States, and where a token of each class leads from them.

    ``of`` (V,) is the class of each id, -1 where no state takes it; ``next`` (S, C) the state a
    class leads to, -1 for none; ``accepting`` (S,) says where a text may end, ``closed`` (S,) where
    it has ended: behind a stop id only stop ids and padding follow.  Several formats may share one
    automaton: each begins at states of its own.
    """

    of: IntArray
    next: IntArray
    accepting: BoolArray
    closed: BoolArray

    @classmethod
    def ending(cls, tables: Tables, stop_ids: Sequence[int], pad_id: int, size: int) -> Self:
        """``tables`` over ``size`` ids, with a state behind the end that stop ids lead to, and that
        they and ``pad_id`` do not leave."""
        states, count = tables.next.shape
        of = np.full(size, -1)
        shared = min(size, len(tables.of))
        of[:shared] = tables.of[:shared]
        stops = [i for i in stop_ids if 0 <= i < size]
        of[stops] = count
        pads = [pad_id] if 0 <= pad_id < size and pad_id not in stops else []
        of[pads] = count + 1
        follow = np.full((states + 1, count + 2), -1)
        follow[:states, :count] = tables.next
        follow[:states, count] = np.where(tables.accepting, states, -1)
        follow[states, count:] = states
        ends = np.arange(states + 1) == states
        return cls(of, follow, np.append(tables.accepting, False), ends)

    @classmethod
    def union(cls, automata: Sequence[Self]) -> tuple[Self, list[int]]:
        """Several side by side, and where the states of each begin."""
        if len(automata) == 1:
            return automata[0], [0]
        columns, of = np.unique(np.stack([a.of for a in automata]), axis=1, return_inverse=True)
        dead = (columns < 0).all(0)
        number = np.where(dead, -1, np.cumsum(~dead) - 1)
        columns, starts, blocks = columns[:, ~dead], list[int](), list[IntArray]()
        for a, column in zip(automata, columns, strict=True):
            starts.append(sum(map(len, blocks)))
            follow = np.where(column >= 0, a.next[:, column], -1)
            blocks.append(np.where(follow >= 0, follow + starts[-1], -1))
        return cls(
            number[of.ravel()], np.concatenate(blocks),  # NumPy 2.0.0 gives it two axes
            np.concatenate([a.accepting for a in automata]),
            np.concatenate([a.closed for a in automata]),
        ), starts  # fmt: skip

    @cached_property
    def classes(self) -> TokenClasses:
        return TokenClasses(self.of, self.next.shape[1])

    @cached_property
    def uniform(self) -> npt.NDArray[np.float64]:
        """(C,) log-probability of each class where nothing is known: its share of the ids."""
        counts = np.bincount(self.of[self.of >= 0], minlength=self.next.shape[1])
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(counts / len(self.of)))

    @cached_property
    def _ways(self) -> tuple[IntArray, IntArray, IntArray]:
        return _grouped(self.next)

    def ways(self, state: int) -> tuple[IntArray, IntArray]:
        """The classes that may follow in a state, ascending, and where they lead."""
        label, target, bounds = self._ways
        here = slice(bounds[state], bounds[state + 1])
        return label[here], target[here]

    @cached_property
    def _takers(self) -> tuple[IntArray, IntArray, IntArray]:
        return _grouped(self.next.T)

    def taking(self, labels: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """For each of the ``labels`` (n,) the states that take it, and where it leads from them:
        the index of the label, the state and the next one (k,), side by side."""
        state, target, bounds = self._takers
        sizes = bounds[labels + 1] - bounds[labels]
        here = ranges(bounds[labels], sizes)
        return np.repeat(np.arange(len(labels)), sizes), state[here], target[here]

    @cached_property
    def arcs(self) -> Arcs:
        return Arcs(self.next)

    def class_of(self, tokens: IntArray) -> IntArray:
        """The class of each token, -1 for none."""
        known = (tokens >= 0) & (tokens < len(self.of))
        return np.where(known, self.of[np.where(known, tokens, 0)], -1)

    def run(self, state: int, tokens: IntArray) -> int:
        """Where tokens lead, -1 for nowhere."""
        for label in self.class_of(tokens).tolist():
            state = int(self.next[state, label]) if state >= 0 and label >= 0 else -1
        return state

    def before(self, states: BoolArray, label: int | None = None) -> BoolArray:
        """(S,) from where one token, any or one of this class, leads to one of ``states`` (S,)."""
        if label is not None:
            follow = self.next[:, label]
            return (follow >= 0) & states[follow] & (label >= 0)
        arcs, result = self.arcs, np.zeros_like(states)
        result[arcs.sources] = np.logical_or.reduceat(states[arcs.target], arcs.first)
        return result

    def leading(self, tokens: IntArray, masked: BoolArray, final: BoolArray) -> BoolArray:
        """(S,) from where some completion of ``tokens``, any id standing where ``masked``, leads to
        one of the ``final`` states (S,)."""
        states, steady = final, False  # whether one more free position changes nothing
        labels = self.class_of(tokens)[::-1].tolist()
        for label, free in zip(labels, masked[::-1].tolist(), strict=True):
            if free and steady:
                continue
            earlier = self.before(states, None if free else label)
            states, steady = earlier, free and np.array_equal(earlier, states)
        return states

    @cached_property
    def need(self) -> IntArray:
        """(S,) fewest tokens from each state to the end of a text; it may end there with 0."""
        result = np.where(self.accepting | self.closed, 0, len(self.accepting))
        for count in range(1, len(result)):
            near = result < count
            more = self.before(near) & ~near
            if not more.any():
                break
            result[more] = count
        return result


def _grouped(table: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Where a table's entries stand in its rows, what they are, where rows begin; without -1."""
    row, column = (table >= 0).nonzero()
    return column, table[row, column], np.searchsorted(row, np.arange(len(table) + 1))
