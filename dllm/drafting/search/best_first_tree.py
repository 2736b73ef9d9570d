"""Trees of the most probable prefixes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...core.errors import ConfigError
from ..base import Draft
from .chains import Search, SearchContext, register
from .grow import Node, grow
from .marginals import Marginals


@register("best_first_tree", paper="DDTree", arxiv="2604.12989")
@dataclass
class BestFirstTree(Search):
    """The ``nodes`` most probable prefixes, if positions were independent.

    That tree maximises the expected number of accepted tokens under the product of the marginals.
    ``cap`` candidates per position; ``coupled`` as in `cps`.
    """

    trees = True
    nodes: int = 16
    cap: int = 15
    coupled: bool = True

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.cap < 1:
            raise ConfigError("best_first_tree takes nodes >= 1 and cap >= 1")

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        shown = context.shown(marginals, length, self.coupled)
        lattice = shown.lattice(length, mass=1.0, cap=self.cap)

        def children(node: Node) -> Iterator[tuple[float, int, None]]:
            if node.token not in lattice.stop_ids:
                for candidate in lattice.columns[node.depth + 1]:
                    yield candidate.logp, candidate.token, None

        tree = grow(children, self.nodes, len(lattice.columns))
        depths = [node.depth for node in tree]
        return Draft(
            np.array([node.token for node in tree], np.int64),
            np.array([node.parent for node in tree], np.int64),
            confidence=marginals.confidence[depths], end=marginals.end, source=self.name,
        )  # fmt: skip
