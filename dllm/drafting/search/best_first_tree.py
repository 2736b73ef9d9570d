"""Trees of the most probable prefixes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from ...errors import ConfigError
from ..base import ROOT, Draft
from .chains import Search, SearchContext, register
from .marginals import Lattice, Marginals


@register("best_first_tree", paper="DDTree", arxiv="2604.12989")
@dataclass
class BestFirstTree(Search):
    """The ``nodes`` most probable prefixes, if positions were independent.

    That tree maximises the expected number of accepted tokens under the product of the marginals.
    ``weight`` < 1 mixes the proxy's conditional log-probability into the score of every node, as in
    `cps`; ``cap`` candidates per position; ``coupled`` as in `cps`.
    """

    nodes: int = 16
    cap: int = 15
    weight: float = 1.0
    coupled: bool = True

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.cap < 1 or not 0 <= self.weight <= 1:
            raise ConfigError("best_first_tree takes nodes >= 1, cap >= 1 and 0 <= weight <= 1")

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        shown = context.shown(marginals, length, self.coupled)
        lattice = shown.lattice(length, mass=1.0, cap=self.cap)
        tokens, parents, depths = grow(lattice, self.nodes, context, self.weight)
        return Draft(
            np.asarray(tokens, np.int64), np.asarray(parents, np.int64),
            confidence=marginals.confidence[depths], end=marginals.end, source=self.name,
        )  # fmt: skip


def grow(
    lattice: Lattice, nodes: int, context: SearchContext, weight: float = 1.0
) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and depths of the ``nodes`` best prefixes, best first."""
    proxy = context.proxy
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    states = {ROOT: proxy.start(context.prefix.tolist())} if weight < 1 else {}

    def children(node: int, depth: int, score: float) -> list[tuple[float, int]]:
        """(-score, token) of all children, best first."""
        column = lattice.columns[depth]
        if weight == 1:
            return [(-(score + c.logp), c.token) for c in column]
        causal = proxy.logprobs(states[node], [c.token for c in column])
        return sorted((-(score + weight * c.logp + (1 - weight) * other), c.token)
                      for c, other in zip(column, causal, strict=True))  # fmt: skip

    # (-score, order of arrival, parent, depth, rank among siblings, siblings)
    heap: list[tuple[float, int, int, int, int, list[tuple[float, int]]]] = []
    arrivals = 0

    def push(parent: int, depth: int, rank: int, siblings: list[tuple[float, int]]) -> None:
        nonlocal arrivals
        if rank < len(siblings):
            heapq.heappush(heap, (siblings[rank][0], arrivals, parent, depth, rank, siblings))
            arrivals += 1

    if lattice.columns:
        push(ROOT, 0, 0, children(ROOT, 0, 0.0))
    while heap and len(tokens) < nodes:
        minus, _, parent, depth, rank, siblings = heapq.heappop(heap)
        me, token = len(tokens), siblings[rank][1]
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        push(parent, depth, rank + 1, siblings)
        if depth + 1 < len(lattice.columns) and token not in lattice.stop_ids:
            if weight < 1:
                states[me] = proxy.advance(states[parent], token)
            push(me, depth + 1, 0, children(me, depth + 1, -minus))
    return tokens, parents, depths


@register("dyspec", paper="DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure",
          arxiv="2410.11744")  # fmt: skip
@dataclass
class DySpec(BestFirstTree):
    """`best_first_tree` of 64 nodes: DySpec's greedy expansion by estimated value.

    Its value of a node is the drafter's probability of the path; with marginals that does not
    depend on the path, so that its tree and DDTree's are the same.
    """

    nodes: int = 64
