"""Trees of the most probable prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import ConfigError
from ..base import Draft
from .chains import Search, SearchContext, register
from .grow import Node, grow
from .marginals import Lattice, Marginals


@register("best_first_tree", paper="DDTree", arxiv="2604.12989")
@dataclass
class BestFirstTree(Search):
    """The ``nodes`` most probable prefixes, if positions were independent.

    That tree maximises the expected number of accepted tokens under the product of the marginals.
    ``weight`` < 1 mixes the proxy's conditional log-probability into the score of every node, as in
    `cps`; ``cap`` candidates per position; ``coupled`` as in `cps`.
    """

    trees = True
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
        tree = grow_lattice(lattice, self.nodes, context, self.weight)
        depths = [node.depth for node in tree]
        return Draft(
            np.array([node.token for node in tree], np.int64),
            np.array([node.parent for node in tree], np.int64),
            confidence=marginals.confidence[depths], end=marginals.end, source=self.name,
        )  # fmt: skip


def grow_lattice(
    lattice: Lattice, nodes: int, context: SearchContext, weight: float = 1.0
) -> list[Node]:
    """The ``nodes`` best prefixes of a lattice, best first."""
    proxy = context.proxy

    def children(node: Node) -> Iterator[tuple[float, int, Any]]:
        if node.token in lattice.stop_ids:
            return
        column, state = lattice.columns[node.depth + 1], node.mark
        if weight < 1 and node.depth >= 0:
            state = proxy.advance(state, node.token)
        tokens = [candidate.token for candidate in column]
        causal = proxy.logprobs(state, tokens) if weight < 1 else [0.0] * len(tokens)
        for c, other in zip(column, causal, strict=True):
            yield weight * c.logp + (1 - weight) * other, c.token, state

    start = proxy.start(context.prefix.tolist()) if weight < 1 else None
    return grow(children, nodes, len(lattice.columns), start)
