"""Trees of the most probable prefixes, whoever says what may follow."""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from ..base import ROOT, Budget, Draft


class Node(NamedTuple):
    """A token of a tree: its ``index`` (`ROOT` for the root), the index of its ``parent``, its
    ``depth`` (-1 for the root), the log-probabilities ``chance``, given its parent, and ``score``,
    of its path; ``mark``: what its drafter wants to know of it."""

    token: int
    index: int  # type: ignore[assignment]  # a tuple has a method of this name
    parent: int
    depth: int
    chance: float
    score: float
    mark: Any

    @property
    def alive(self) -> float:
        """The chance of the whole path."""
        return math.exp(self.score)


def draft_of(tree: Sequence[Node], budget: Budget, source: str) -> Draft:
    """As many nodes of a tree as are worth their time: a chain where each follows the one before,
    with the chance of each behind it as confidence."""
    tokens, parents = [node.token for node in tree], [node.parent for node in tree]
    if parents == list(range(-1, len(tree) - 1)):
        return budget.chain(tokens, [math.exp(node.chance) for node in tree], source)
    alive = np.array([node.alive for node in tree])
    n = budget.tree_size(alive)
    nodes, above = np.array(tokens[:n], np.int64), np.array(parents[:n], np.int64)
    return Draft(nodes, above, confidence=alive[:n], source=source)


Children = Callable[[Node], Iterable[tuple[float, int, Any]]]


def grow(
    children: Children, nodes: int, length: int, mark: Any = None,
    enough: Callable[[Sequence[Node], Node], bool] = lambda tree, best: False,
) -> list[Node]:  # fmt: skip
    """The ``nodes`` best prefixes of at most ``length`` tokens, best first; of equals the earlier.

    ``children`` of a node: logarithm of the chance, token and mark of each; the root has ``mark``.
    ``enough`` is asked with the tree and the next best node whether to stop there.
    """
    tree: list[Node] = []
    heap: list[tuple[Any, int, Node]] = []
    arrivals = count()
    node = Node(ROOT, ROOT, ROOT, -1, 0.0, 0.0, mark)
    while len(tree) < nodes:
        if node.depth + 1 < length:
            for chance, token, known in children(node):
                score, depth = node.score + chance, node.depth + 1
                child = Node(token, ROOT, node.index, depth, chance, score, known)
                heapq.heappush(heap, (-round(score, 9), next(arrivals), child))
        if not heap or enough(tree, heap[0][2]):
            break
        node = heapq.heappop(heap)[2]._replace(index=len(tree))
        tree.append(node)
    return tree
