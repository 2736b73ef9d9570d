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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .automaton import Automaton, BoolArray, IntArray

Float64Array = npt.NDArray[np.float64]
LEAST = 1e-300  # no state counts for less, beside the others of its position
LOWEST = -690.0  # and no arc, its logarithm
MOST_ARCS = 20_000  # of an automaton all of whose states are looked at
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
        shape = len(chains), self.length + 1, len(automaton.accepting)
        self.best = np.full(shape, -np.inf)  # weight of the likeliest way to the end
        self.mass = np.zeros(shape)  # of all ways, as a multiple of the likeliest, scaled
        self.scaled = np.zeros(shape)  # the same, at most 1 at each position
        self._terms: list[Float64Array] = []  # (R, A) of the masses, by arcs; last position first
        self._backward()

    def _backward(self) -> None:
        arcs, shape = self.automaton.arcs, (len(self.rows), self.length, len(self.automaton.next.T))
        weight, law = np.zeros(shape), np.zeros(shape)
        for chain, row in self.rows.items():
            weight[row, self._first(chain) :] = chain.weight
            law[row, self._first(chain) :] = chain.law
            self.best[row, -1, chain.final] = 0.0
        self.scaled[:, -1] = self.best[:, -1] == 0.0
        largest = np.maximum.reduceat(weight.take(arcs.labels, 2), arcs.sets, axis=2)
        finite = np.where(largest == -np.inf, 0.0, largest)
        ways = law.take(arcs.labels, 2) - finite.take(arcs.set_of_label, 2)
        ways = np.add.reduceat(np.exp(ways, out=ways), arcs.sets, axis=2)
        for i in range(self.length - 1, -1, -1):
            x = largest[:, i].take(arcs.label, 1)
            x += self.best[:, i + 1].take(arcs.target, 1)
            best = np.maximum.reduceat(x, arcs.first, axis=1)
            x -= np.where(best == -np.inf, 0.0, best).take(arcs.run, 1)
            np.exp(np.maximum(x, LOWEST, out=x), out=x)  # slow for numbers that come to nothing
            x *= ways[:, i].take(arcs.label, 1)
            x *= self.scaled[:, i + 1].take(arcs.target, 1)
            mass = np.add.reduceat(x, arcs.first, axis=1)
            top = mass.max(1, keepdims=True)
            self._terms.append(x)
            self.best[:, i, arcs.sources], self.mass[:, i, arcs.sources] = best, mass
            self.scaled[:, i, arcs.sources] = np.maximum(mass / np.where(top > 0, top, 1), LEAST)

    def _first(self, chain: Chain) -> int:
        """Where a chain begins."""
        return self.length - len(chain.weight)

    def possible(self, chain: Chain) -> bool:
        """Whether a chain has any completion."""
        ways = self.best[self.rows[chain], self._first(chain)]
        return chain.start >= 0 and bool(ways[chain.start] > -np.inf)

    def likeliest(self, chain: Chain) -> IntArray:
        """(L,) classes of the completion with the largest sum of weights, ties going to the lowest
        class at the first position where they differ."""
        best = self.best[self.rows[chain], self._first(chain) :]
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
        best, scaled = self.best[row, first:], self.scaled[row, first:]
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
            x[row, first:] for x in (self.best, self.mass, self.scaled, self._visits)
        )
        at, state = np.nonzero(visits[:-1])
        follow = self.automaton.next[state, path[at]]
        at, state, follow = at[follow >= 0], state[follow >= 0], follow[follow >= 0]
        share = np.exp(chain.law[at, path[at]] + best[at + 1, follow] - best[at, state])
        share *= scaled[at + 1, follow] * visits[at, state] / mass[at, state]
        return np.asarray(np.log(np.bincount(at, share, len(path)).clip(LEAST, 1.0)))

    @cached_property
    def _visits(self) -> Float64Array:
        """(R, L + 1, S) probability that a completion is in a state."""
        arcs, visits = self.automaton.arcs, np.zeros_like(self.mass)
        for chain, row in self.rows.items():
            if chain.start >= 0:
                visits[row, self._first(chain), chain.start] = 1.0
        share = np.zeros_like(self.mass[:, 0])
        for i in range(self.length):
            np.divide(visits[:, i], self.mass[:, i], out=share, where=self.mass[:, i] > 0)
            x = self._terms[-1 - i] * share.take(arcs.source, 1)
            visits[:, i + 1, arcs.targets] += np.add.reduceat(
                x.take(arcs.by_target, 1), arcs.first_into, axis=1
            )
        return visits


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
        super().__init__(automaton, [chain])

    @property
    def whole(self) -> bool:
        return self.bound == -np.inf

    @property
    def certain(self) -> bool:
        return bool(self.bound <= self.best[0, 0, self.chain.start])

    def _forward(self) -> None:
        """The kept states, and the arcs between them."""
        arcs, chain = self.automaton.arcs, self.chain
        ahead = self._leading()
        later = np.append(chain.weight.max(1)[::-1].cumsum()[::-1], 0.0)
        states, scores = np.array([chain.start]), np.zeros(len(ahead[0]))
        for i, weight in enumerate(chain.weight):
            here = arcs.leaving(states)
            target = arcs.target[here]
            here, target = here[ahead[i + 1][target]], target[ahead[i + 1][target]]
            used = np.zeros(len(arcs.sets), np.bool_)
            used[arcs.label[here]] = True
            labels, first, of = arcs.members(used.nonzero()[0])
            largest = np.maximum.reduceat(weight[labels], first) if labels.size else np.zeros(0)
            which = (used.cumsum() - 1)[arcs.label[here]]
            best = largest[which]
            reached = np.full(len(scores), -np.inf)
            np.maximum.at(reached, target, scores[arcs.source[here]] + best)
            states, scores = np.flatnonzero(reached > -np.inf), reached
            if len(states) > self.kept:
                order = np.argsort(-scores[states], kind="stable")
                self.bound = max(self.bound, scores[states[order[self.kept]]] + later[i + 1])
                scores[states[order[self.kept :]]] = -np.inf
                states = np.sort(states[order[: self.kept]])
            inside = (scores[target] > -np.inf) & (best > -np.inf)
            finite = np.where(largest == -np.inf, 0.0, largest)
            ways = np.exp(chain.law[i][labels] - finite[of])
            ways = np.add.reduceat(ways, first) if labels.size else np.zeros(0)
            self._steps.append(Step(here[inside], best[inside], ways[which][inside]))

    def _leading(self) -> list[BoolArray]:
        """(S,) per position: from where the end can be reached."""
        chain, automaton = self.chain, self.automaton
        found, steady = [chain.final], False
        for weight in chain.weight[::-1]:
            possible = weight > -np.inf
            if np.count_nonzero(possible) == 1:
                follow, states = automaton.next[:, int(possible.argmax())], found[-1]
                found.append((follow >= 0) & states[follow])
                steady = False
            elif steady:
                found.append(found[-1])
            else:
                found.append(automaton.before(found[-1]))
                steady = np.array_equal(found[-1], found[-2])
        return found[::-1]

    def _backward(self) -> None:
        self.best[0, -1, self.chain.final] = 0.0
        self.scaled[0, -1] = self.best[0, -1] == 0.0
        if self.chain.start < 0:
            return
        self._forward()
        arcs = self.automaton.arcs
        for i in range(self.length - 1, -1, -1):
            here, largest, ways = self._steps[i]
            if not here.size:
                self._terms.append(np.zeros(0))
                continue
            source = arcs.source[here]  # ascending
            heads = np.append(True, source[1:] != source[:-1])
            first, run = heads.nonzero()[0], heads.cumsum() - 1
            sources = source[first]
            x = largest + self.best[0, i + 1, arcs.target[here]]
            best = np.maximum.reduceat(x, first)
            x = np.exp(np.maximum(x - np.where(best == -np.inf, 0.0, best)[run], LOWEST))
            x *= ways * self.scaled[0, i + 1, arcs.target[here]]
            mass = np.add.reduceat(x, first)
            top = mass.max()
            self._terms.append(x)
            self.best[0, i, sources], self.mass[0, i, sources] = best, mass
            self.scaled[0, i, sources] = np.maximum(mass / (top if top > 0 else 1), LEAST)

    @cached_property
    def _visits(self) -> Float64Array:
        arcs, visits = self.automaton.arcs, np.zeros_like(self.mass)
        visits[0, 0, self.chain.start] = 1.0
        for i in range(self.length):
            here = self._steps[i].arcs
            source, mass = arcs.source[here], self.mass[0, i, arcs.source[here]]
            share = self._terms[-1 - i] * visits[0, i, source] / np.where(mass > 0, mass, 1.0)
            visits[0, i + 1] = np.bincount(arcs.target[here], share, len(visits[0, 0]))
        return visits


class Step(NamedTuple):
    """Arcs (a,) between kept states of two positions, the largest weight of each one's classes,
    and the sum of their laws beside it."""

    arcs: IntArray
    largest: Float64Array
    ways: Float64Array
