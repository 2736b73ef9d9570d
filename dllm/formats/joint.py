"""One joint completion of all undecided positions: the likeliest, or drawn; and how sure each is.

Predictions of a step are independent distributions per position.  Restricted to the texts of an
automaton they are not independent any more, but a chain along the positions whose state is the
automaton's: dynamic programming finds the likeliest completion (DINGO, arXiv 2505.23061), draws
one exactly, and gives exact marginals (Dang and Ermon, arXiv 2607.07026).  Whatever subset of one
completion is committed, the rest of it still completes the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .automaton import Automaton, BoolArray, Edges, IntArray

Float64Array = npt.NDArray[np.float64]
Fold = Callable[[Float64Array, Edges], Float64Array]


@dataclass(frozen=True)
class Chain:
    """Positions in a row, of which some are undecided.

    ``weight`` (L, C) float64: log-probability of each class at each undecided position, up to a
    constant per position; ``decided`` (L,): the class that stands there, -1 where none does yet.
    ``start``: the state before the first position; ``final`` (S,) bool: the states in which the
    last may end.
    """

    weight: Float64Array
    decided: IntArray
    start: int
    final: BoolArray


def likeliest(automaton: Automaton, chain: Chain) -> IntArray | None:
    """(L,) classes of the completion with the largest sum of weights, ties going to the lowest
    class at the first position where they differ; None if there is no completion."""
    ahead = backward(automaton, chain, largest)
    if chain.start < 0 or ahead[0, chain.start] == -np.inf:
        return None
    state, path = chain.start, np.empty(len(chain.weight), np.int64)
    for i, weight in enumerate(chain.weight):
        follow = automaton.next[state]
        if chain.decided[i] >= 0:
            path[i] = chain.decided[i]
            state = int(follow[path[i]])
            continue
        label = (follow >= 0).nonzero()[0]
        path[i] = label[(weight[label] + ahead[i + 1, follow[label]]).argmax()]
        state = int(follow[path[i]])
    return path


def drawn(automaton: Automaton, chain: Chain, noise: Float64Array) -> IntArray | None:
    """(L,) classes of a completion drawn with probability proportional to the exponential of its
    weight; ``noise`` (L,) are uniform numbers.  None if there is no completion."""
    ahead = backward(automaton, chain, log_sums)
    if chain.start < 0 or ahead[0, chain.start] == -np.inf:
        return None
    state, path = chain.start, np.empty(len(chain.weight), np.int64)
    for i, weight in enumerate(chain.weight):
        follow = automaton.next[state]
        if chain.decided[i] >= 0:
            path[i] = chain.decided[i]
            state = int(follow[path[i]])
            continue
        label = (follow >= 0).nonzero()[0]
        share = np.exp(weight[label] + ahead[i + 1, follow[label]] - ahead[i, state]).cumsum()
        at = int(share.searchsorted(noise[i] * share[-1], "right"))
        path[i] = label[min(at, len(label) - 1)]
        state = int(follow[path[i]])
    return path


def marginals(automaton: Automaton, chain: Chain, path: IntArray) -> Float64Array:
    """(L,) log-probabilities that the class of ``path`` (L,) stands at its position, among all
    completions."""
    ahead, behind = backward(automaton, chain, log_sums), forward(automaton, chain)
    follow = automaton.next[:, path].T
    through = np.where(follow >= 0, np.take_along_axis(ahead[1:], follow, 1), -np.inf) + behind[:-1]
    best = through.max(1)
    total = best + np.log(np.exp(through - best[:, None]).sum(1))
    own = np.where(chain.decided < 0, chain.weight[np.arange(len(path)), path], 0.0)
    result: Float64Array = np.minimum(total + own - ahead[0, chain.start], 0.0)
    return result


def backward(automaton: Automaton, chain: Chain, fold: Fold) -> Float64Array:
    """(L + 1, S): what the completions from a position on weigh, by the state before it."""
    edges, length = automaton.out, len(chain.weight)
    ahead = np.full((length + 1, len(chain.final)), -np.inf)
    ahead[length, chain.final] = 0.0
    for i in range(length - 1, -1, -1):
        label = chain.decided[i]
        if label >= 0:
            follow = automaton.next[:, label]
            ahead[i] = np.where(follow >= 0, ahead[i + 1, follow], -np.inf)
        elif len(edges.at):
            ahead[i, edges.at] = fold(
                chain.weight[i, edges.label] + ahead[i + 1, edges.target], edges
            )
    return ahead


def forward(automaton: Automaton, chain: Chain) -> Float64Array:
    """(L + 1, S): what the beginnings up to a position weigh in sum, by the state behind it."""
    edges, length = automaton.into, len(chain.weight)
    behind = np.full((length + 1, len(chain.final)), -np.inf)
    behind[0, chain.start] = 0.0
    for i in range(length):
        label = chain.decided[i]
        if label >= 0:
            follow = automaton.next[:, label]
            live = follow >= 0
            np.logaddexp.at(behind[i + 1], follow[live], behind[i, live])
        elif len(edges.at):
            behind[i + 1, edges.at] = log_sums(
                chain.weight[i, edges.label] + behind[i, edges.source], edges
            )
    return behind


def largest(x: Float64Array, edges: Edges) -> Float64Array:
    """(k,) the largest over the edges of each state."""
    return np.asarray(np.maximum.reduceat(x, edges.first))


def log_sums(x: Float64Array, edges: Edges) -> Float64Array:
    """(k,) the logarithm of the sum of exponentials over the edges of each state."""
    best = np.maximum.reduceat(x, edges.first)
    safe = np.where(best == -np.inf, 0.0, best)
    with np.errstate(divide="ignore"):
        return np.asarray(safe + np.log(np.add.reduceat(np.exp(x - safe[edges.run]), edges.first)))
