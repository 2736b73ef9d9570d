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
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..core.canvas import BoolArray, IntArray
from ..kernels.statistics.classes import exponentials
from .automaton import Arcs, Automaton

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
            exponentials(np.maximum(terms, LOWEST, out=terms))  # slow for what is nothing
            terms *= ways[low:high].take(arcs.label, 2)
            for i in range(high - 1, low - 1, -1):
                terms[i - low] *= self.scaled[i + 1].take(arcs.target, 1)
                self.mass[i] = mass = self._summed(arcs.source, terms[i - low])
                if not (self.length - i) % RESCALED:  # as far from the end in every company
                    mass /= np.maximum(mass.max(1, keepdims=True), LEAST)
                    np.maximum(mass, LEAST, out=mass)
                self.scaled[i] = mass

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
        for i in range(self.length):
            share = (visits[i] * each[i]).take(arcs.source, 1)
            share *= self._terms[i]
            visits[i + 1] += self._summed(arcs.target, share)
        return visits

    def _summed(self, states: IntArray, values: Float64Array) -> Float64Array:
        """(R, S) sums of ``values`` (R, A) by the state of each arc."""
        rows, size = self.best.shape[1:]
        if rows > 1:
            states = (states + size * np.arange(rows)[:, None]).ravel()
        found = np.bincount(states, values.ravel(), rows * size).reshape(rows, size)
        return np.asarray(found, np.float64)


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
        super().__init__(automaton, [chain])

    @property
    def whole(self) -> bool:
        return self.bound == -np.inf

    @property
    def certain(self) -> bool:
        return bool(self.bound <= self.best[0, 0, self.chain.start])

    def _forward(self) -> tuple[Float64Array, Float64Array]:
        """The kept states of all positions side by side, and the arcs between them; the largest
        weight of each arc's classes, and the sum of their laws beside it."""
        arcs, chain, ahead = self.automaton.arcs, self.chain, self._leading()
        largest, ways = _of_sets(arcs, chain.weight, chain.law)
        later = np.append(chain.weight.max(1)[::-1].cumsum()[::-1], 0.0)
        states, scores, place = np.array([chain.start]), np.zeros(1), np.empty(len(ahead[0]), int)
        kept, steps, count = [states], list[tuple[IntArray, ...]](), 0
        for i in range(self.length):
            here, source = arcs.leaving(states)
            target, label = arcs.target.take(here), arcs.label.take(here)
            best, reached = largest[i].take(label), np.full(len(place), -np.inf)
            np.maximum.at(reached, target, scores.take(source) + best)
            source += count
            count += len(states)
            states = np.flatnonzero(ahead[i + 1] & (reached > -np.inf))
            if len(states) > self.kept:
                states, dropped = _largest(states, reached.take(states), self.kept)
                self.bound = max(self.bound, reached.take(dropped).max() + later[i + 1])
            scores = reached.take(states)
            place.fill(-1)
            place[states] = np.arange(count, count + len(states))
            target = place.take(target)
            inside = np.flatnonzero((target >= 0) & (best > -np.inf))
            found = source, target, best, ways[i].take(label)
            steps.append(tuple(x.take(inside) for x in found))
            kept.append(states)
        self._states, sizes = np.concatenate(kept), [*map(len, kept)]
        self._at, self._places = np.repeat(np.arange(len(kept)), sizes), np.cumsum([0, *sizes])
        self._bounds = np.cumsum([0, *(len(step[0]) for step in steps)])
        self._source, self._target, best, sums = map(np.concatenate, zip(*steps, strict=True))
        return best, sums

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
        x, ways = self._forward()
        source, target, size = self._source, self._target, len(self._states)
        best, mass, scaled = np.full(size, -np.inf), np.zeros(size), np.zeros(size)
        best[self._places[-2] :], scaled[self._places[-2] :] = 0.0, 1.0
        heads = np.flatnonzero(np.diff(source, prepend=-1))  # sources ascend
        cuts = np.searchsorted(heads, self._bounds)
        steps = [
            (slice(a, b), heads[c:d] - a, source[heads[c:d]])
            for (a, b), (c, d) in zip(pairwise(self._bounds), pairwise(cuts), strict=True) if a < b
        ][::-1]  # fmt: skip
        for here, first, sources in steps:
            x[here] += best.take(target[here])
            best[sources] = np.maximum.reduceat(x[here], first)
        x -= np.where(best == -np.inf, 0.0, best).take(source)
        exponentials(np.maximum(x, LOWEST, out=x))
        x *= ways
        for here, first, sources in steps:
            x[here] *= scaled.take(target[here])
            mass[sources] = some = np.add.reduceat(x[here], first)
            scaled[sources] = np.maximum(some / (some.max() or 1.0), LEAST)
        self._shares = x / np.where(mass > 0, mass, 1.0).take(source)
        at = self._at, 0, self._states
        self.best[at], self.mass[at], self.scaled[at] = best, mass, scaled

    @cached_property
    def _visits(self) -> Float64Array:
        visits, found = np.zeros(self.mass.shape), np.zeros(len(self._states))
        found[0] = 1.0
        for (a, b), (low, high) in zip(
            pairwise(self._bounds), pairwise(self._places[1:]), strict=True
        ):
            share = self._shares[a:b] * found.take(self._source[a:b])
            found[low:high] = np.bincount(self._target[a:b] - low, share, high - low)
        visits[self._at, 0, self._states] = found
        return visits

    def _taking(self, path: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        at, state = (x[: self._places[-2]] for x in (self._at, self._states))
        follow = self.automaton.next[state, path[at]]
        takes = follow >= 0
        return at[takes], state[takes], follow[takes]


def _of_sets(
    arcs: Arcs, weight: Float64Array, law: Float64Array
) -> tuple[Float64Array, Float64Array]:
    """Of each set of classes (..., U) the largest weight (..., C) and the sum of laws (..., C)."""
    one = arcs.single  # what a reduction does for one class is slow
    largest, ways = weight.take(arcs.labels, -1), law.take(arcs.labels, -1)
    more = np.maximum.reduceat(largest[..., one:], arcs.sets, axis=-1)
    largest = np.concatenate([largest[..., :one], more], -1)
    finite = np.where(largest == -np.inf, 0.0, largest)
    exponentials(np.subtract(ways, finite.take(arcs.set_of_label, -1), out=ways))
    more = np.add.reduceat(ways[..., one:], arcs.sets, axis=-1)
    return largest, np.concatenate([ways[..., :one], more], -1)
