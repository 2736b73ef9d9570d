"""One joint completion of all undecided positions: the likeliest, or drawn; and how sure each is.

Predictions of a step are independent distributions per position.  Restricted to the texts of an
automaton they are not independent any more, but a chain along the positions whose state is the
automaton's: dynamic programming finds the likeliest completion (DINGO, arXiv 2505.23061), draws
one exactly, and gives exact marginals (Dang and Ermon, arXiv 2607.07026).  Whatever subset of one
completion is committed, the rest of it still completes the text.

An automaton of many states is looked at through the likeliest states of each position only.

Sums of probabilities over a long text lie far outside of what a float holds.  They are kept as
multiples of the largest term, whose logarithm is known from the search for the likeliest
completion: each position then takes a multiplication, a sum and one exponential per edge.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .automaton import Arcs, Automaton, BoolArray, IntArray

Float64Array = npt.NDArray[np.float64]
LEAST = 1e-300  # no state counts for less, beside the others of its position
LOWEST = -690.0  # and no arc, its logarithm
MOST_ARCS = 20_000  # of an automaton all of whose states are looked at
RESCALED = 8  # positions after which masses are scaled: each is at most 10^6 times the next
BLOCK = 1 << 14  # terms of sums that are worked on at once, which a processor's cache holds
KEPT = 256  # states per position of a larger one


@dataclass(frozen=True, eq=False)
class Chain:
    """Positions in a row: ``weight`` (L, C) float64 is the log-probability of each class, or of its
    likeliest token, in the search for the likeliest completion, ``law`` (L, C) that of the class
    where completions are drawn and summed up, both up to a constant per position; -inf for all
    others where one is decided.  ``start``: the state before the first position; ``final`` (S,)
    bool: the states in which the last may end."""

    weight: Float64Array
    law: Float64Array
    start: int
    final: BoolArray


class Lattice:
    """All completions of several chains (R) of one automaton, aligned at their ends.

    What a chain gets does not depend on its neighbours.
    """

    def __init__(self, automaton: Automaton, chains: Sequence[Chain]) -> None:
        self.automaton, self.rows = automaton, {chain: row for row, chain in enumerate(chains)}
        self.length = max(len(chain.weight) for chain in chains)
        shape = self.length + 1, len(chains), len(automaton.accepting)
        self.best = np.full(shape, -np.inf)  # weight of the likeliest way to the end
        self.mass = np.zeros(shape)  # of all ways, as a multiple of the likeliest, scaled
        self.scaled = np.zeros(shape)  # the same, now and then scaled to at most 1
        self._backward()

    def _backward(self) -> None:
        arcs, shape = self.automaton.arcs, (self.length, len(self.rows), len(self.automaton.next.T))
        weight, law = np.zeros((2, *shape))
        for chain, row in self.rows.items():
            weight[self._first(chain) :, row] = chain.weight
            law[self._first(chain) :, row] = chain.law
            self.best[-1, row, chain.final] = 0.0
        self.scaled[-1] = self.best[-1] == 0.0
        largest, ways = _of_sets(arcs, weight, law)
        self._terms = largest.take(arcs.label, 2)  # (L, R, A): weights, then the masses
        size = max(1, BLOCK // self._terms[0].size)
        for high in range(self.length, 0, -size):
            low = max(high - size, 0)
            terms = self._terms[low:high]
            for i in range(high - 1, low - 1, -1):
                terms[i - low] += self.best[i + 1].take(arcs.target, 1)
                self.best[i][:, arcs.sources] = np.maximum.reduceat(terms[i - low], arcs.first, 1)
            best = self.best[low:high]
            terms -= np.where(best == -np.inf, 0.0, best).take(arcs.source, 2)
            np.exp(np.maximum(terms, LOWEST, out=terms), out=terms)  # slow for what is nothing
            terms *= ways[low:high].take(arcs.label, 2)
            for i in range(high - 1, low - 1, -1):
                terms[i - low] *= self.scaled[i + 1].take(arcs.target, 1)
                mass = np.add.reduceat(terms[i - low], arcs.first, 1)
                self.mass[i][:, arcs.sources] = mass
                if not (self.length - i) % RESCALED:  # as far from the end in every company
                    mass /= np.maximum(mass.max(1, keepdims=True), LEAST)
                    np.maximum(mass, LEAST, out=mass)
                self.scaled[i][:, arcs.sources] = mass

    def _first(self, chain: Chain) -> int:
        """Where a chain begins."""
        return self.length - len(chain.weight)

    def possible(self, chain: Chain) -> bool:
        """Whether a chain has any completion."""
        ways = self.best[self._first(chain), self.rows[chain]]
        return chain.start >= 0 and bool(ways[chain.start] > -np.inf)

    def likeliest(self, chain: Chain) -> IntArray:
        """(L,) classes of the completion with the largest sum of weights, ties going to the lowest
        class at the first position where they differ."""
        best = self.best[self._first(chain) :, self.rows[chain]]
        state, path = chain.start, np.empty(len(chain.weight), np.int64)
        for i, weight in enumerate(chain.weight):
            label, follow = self.automaton.ways(state)
            at = int((weight[label] + best[i + 1, follow]).argmax())
            path[i], state = label[at], int(follow[at])
        return path

    def drawn(self, chain: Chain, noise: Float64Array) -> IntArray:
        """(L,) classes of a completion drawn with probability proportional to the exponential of
        its weight; ``noise`` (L,) are uniform numbers."""
        row, first = self.rows[chain], self._first(chain)
        best, scaled = self.best[first:, row], self.scaled[first:, row]
        state, path = chain.start, np.empty(len(chain.weight), np.int64)
        for i, weight in enumerate(chain.law):
            label, follow = self.automaton.ways(state)
            share = np.exp(weight[label] + best[i + 1, follow] - best[i, state])
            share = (share * scaled[i + 1, follow]).cumsum()
            at = min(int(share.searchsorted(noise[i] * share[-1], "right")), len(label) - 1)
            path[i], state = label[at], int(follow[at])
        return path

    def marginals(self, chain: Chain, path: IntArray) -> Float64Array:
        """(L,) log-probabilities that the class of ``path`` (L,) stands at its position, among all
        completions; at least the logarithm of `LEAST`."""
        row, first = self.rows[chain], self._first(chain)
        best, mass, scaled, visits = (
            x[first:, row] for x in (self.best, self.mass, self.scaled, self._visits)
        )
        at, state, follow = self._taking(path)
        seen = visits[at, state] > 0
        at, state, follow = at[seen], state[seen], follow[seen]
        share = np.exp(chain.law[at, path[at]] + best[at + 1, follow] - best[at, state])
        share *= scaled[at + 1, follow] * visits[at, state] / mass[at, state]
        return np.asarray(np.log(np.bincount(at, share, len(path)).clip(LEAST, 1.0)))

    def _taking(self, path: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """The index of each class of ``path``, the states that take it, and where it leads."""
        return self.automaton.taking(path)

    @cached_property
    def _visits(self) -> Float64Array:
        """(L + 1, R, S) probability that a completion is in a state."""
        arcs, visits = self.automaton.arcs, np.zeros_like(self.mass)
        for chain, row in self.rows.items():
            if chain.start >= 0:
                visits[self._first(chain), row, chain.start] = 1.0
        each = 1 / np.where(self.mass > 0, self.mass, 1.0)
        rows, size = visits.shape[1:]
        target = (arcs.target + size * np.arange(rows)[:, None]).ravel()
        for i in range(self.length):
            share = (visits[i] * each[i]).take(arcs.source, 1)
            share *= self._terms[i]
            visits[i + 1] += np.bincount(target, share.ravel(), rows * size).reshape(rows, size)
        return visits


def _largest(states: IntArray, scores: Float64Array, count: int) -> tuple[IntArray, IntArray]:
    """The ``count`` states with the largest scores, of equal ones the first, and the others."""
    least = np.partition(scores, -count)[-count]
    kept = scores > least
    kept[np.flatnonzero(scores == least)[: count - np.count_nonzero(kept)]] = True
    return states[kept], states[~kept]


class Pruned(Lattice):
    """Completions of one chain through the ``kept`` likeliest states of each position only.

    ``certain``: whether the likeliest of them is the likeliest of all.  What was dropped weighs at
    most its own weight and the largest of each later position.  ``whole``: whether nothing was
    dropped, so that draws and marginals are exact, too.
    """

    def __init__(self, automaton: Automaton, chain: Chain, kept: int = KEPT) -> None:
        self.chain, self.kept = chain, kept
        self.bound = -np.inf
        self._steps: list[Step] = []
        self._masses: list[Float64Array] = []  # of the masses, by arcs; last position first
        self._sources: list[IntArray] = []  # the kept states that arcs leave; last position first
        super().__init__(automaton, [chain])

    @property
    def whole(self) -> bool:
        return self.bound == -np.inf

    @property
    def certain(self) -> bool:
        return bool(self.bound <= self.best[0, 0, self.chain.start])

    def _forward(self) -> None:
        """The kept states, and the arcs between them."""
        arcs, chain, ahead = self.automaton.arcs, self.chain, self._leading()
        largest, ways = _of_sets(arcs, chain.weight, chain.law)
        later = np.append(chain.weight.max(1)[::-1].cumsum()[::-1], 0.0)
        states, scores = np.array([chain.start]), np.full(len(ahead[0]), -np.inf)
        scores[chain.start] = 0.0
        for i in range(self.length):
            here = arcs.leaving(states)
            best, target = largest[i].take(arcs.label[here]), arcs.target[here]
            open_ = ahead[i + 1][target] & (best > -np.inf)
            if not open_.all():
                here, best, target = here[open_], best[open_], target[open_]
            reached = scores[arcs.source[here]] + best
            scores[states] = -np.inf
            np.maximum.at(scores, target, reached)
            states = np.flatnonzero(scores > -np.inf)
            if len(states) > self.kept:
                states, dropped = _largest(states, scores[states], self.kept)
                self.bound = max(self.bound, scores[dropped].max() + later[i + 1])
                scores[dropped] = -np.inf
                inside = np.flatnonzero(scores[target] > -np.inf)
                here, best = here[inside], best[inside]
            self._steps.append(Step(here, best, ways[i].take(arcs.label[here])))

    def _leading(self) -> list[BoolArray]:
        """(S,) per position: from where the end can be reached."""
        found, steady = [self.chain.final], False
        for weight in self.chain.weight[::-1]:
            possible = weight > -np.inf
            label = int(possible.argmax()) if np.count_nonzero(possible) == 1 else None
            if label is not None or not steady:
                found.append(self.automaton.before(found[-1], label))
                steady = label is None and np.array_equal(found[-1], found[-2])
            else:
                found.append(found[-1])
        return found[::-1]

    def _backward(self) -> None:
        self.best[-1, 0, self.chain.final] = 0.0
        self.scaled[-1] = self.best[-1] == 0.0
        if self.chain.start < 0:
            return
        self._forward()
        arcs = self.automaton.arcs
        for i in range(self.length - 1, -1, -1):
            here, largest, ways = self._steps[i]
            if not here.size:
                self._masses.append(largest)
                self._sources.append(here)
                continue
            source = arcs.source[here]  # ascending
            heads = np.append(True, source[1:] != source[:-1])
            first, run = heads.nonzero()[0], heads.cumsum() - 1
            sources = source[first]
            x = largest + self.best[i + 1, 0, arcs.target[here]]
            best = np.maximum.reduceat(x, first)
            x = np.exp(np.maximum(x - np.where(best == -np.inf, 0.0, best)[run], LOWEST))
            x *= ways * self.scaled[i + 1, 0, arcs.target[here]]
            mass = np.add.reduceat(x, first)
            top = mass.max()
            self._masses.append(x)
            self._sources.append(sources)
            self.best[i, 0, sources], self.mass[i, 0, sources] = best, mass
            self.scaled[i, 0, sources] = np.maximum(mass / (top if top > 0 else 1), LEAST)

    @cached_property
    def _visits(self) -> Float64Array:
        arcs, visits = self.automaton.arcs, np.zeros(self.mass.shape)
        visits[0, 0, self.chain.start] = 1.0
        for i in range(self.length):
            here = self._steps[i].arcs
            source, mass = arcs.source[here], self.mass[i, 0, arcs.source[here]]
            share = self._masses[-1 - i] * visits[i, 0, source] / np.where(mass > 0, mass, 1.0)
            np.add.at(visits[i + 1, 0], arcs.target[here], share)
        return visits

    def _taking(self, path: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        sources = self._sources[::-1]
        at, state = np.repeat(np.arange(len(path)), [*map(len, sources)]), np.concatenate(sources)
        follow = self.automaton.next[state, path[at]]
        takes = follow >= 0
        return at[takes], state[takes], follow[takes]


def _of_sets(
    arcs: Arcs, weight: Float64Array, law: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Of each set of classes (..., U) the largest of the weights (..., C), and the sum of the laws
    (..., C) beside it."""
    largest = np.maximum.reduceat(weight.take(arcs.labels, -1), arcs.sets, axis=-1)
    finite = np.where(largest == -np.inf, 0.0, largest)
    ways = law.take(arcs.labels, -1)
    ways -= finite.take(arcs.set_of_label, -1)
    return largest, np.add.reduceat(np.exp(ways, out=ways), arcs.sets, axis=-1)


class Step(NamedTuple):
    """Arcs (a,) between kept states of two positions, the largest weight of each one's classes,
    and the sum of their laws beside it."""

    arcs: IntArray
    largest: Float64Array
    ways: Float64Array
