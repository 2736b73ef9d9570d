"""Token Recycling: the verifier's discarded candidates, kept as a table of likely successors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ..base import DRAFTERS, Budget, Draft, Drafter, Drafting, DraftRequest, Feedback
from ..search.grow import Node, draft_of, grow
from .hits import HitRates

# Ranks of the children that each level of the static tree expands, chosen like the paper's: wide
# near the root, narrow below.  A path is the ranks from the root down.
PATHS = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0),
    (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 0, 0),
)  # fmt: skip


@DRAFTERS.register(
    "token_recycling",
    paper="Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token "
    "Recycling",
    arxiv="2408.08696",
)
@dataclass
class TokenRecycling(Drafter):
    """For every token the ``width`` successors the verifier found most likely the last time.

    The table outlives requests.  The draft is a tree filled from it, of at most 16 nodes (its
    shape is this library's, after the paper's), of which the budget takes those that are worth
    their time: how often successors of each rank were right so far says which.  With
    ``tree=False``, or a verifier that takes chains only, it is the chain of first successors.
    """

    width: int = 8
    tree: bool = True

    def __post_init__(self) -> None:
        if self.width < 4:
            raise ConfigError(f"token_recycling needs width >= 4, not {self.width}")
        self.table: dict[int, list[int]] = {}
        self.hits = HitRates()  # by rank among siblings

    def open(self, request: DraftRequest) -> Drafting:
        return _Recycling(self, request.trees and self.tree)


class _Recycling(Drafting):
    def __init__(self, part: TokenRecycling, trees: bool) -> None:
        self.part, self.trees = part, trees
        self.ranks: list[int] = []  # of the nodes of the last draft

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        tree = grow(self._children, len(PATHS) if self.trees else budget.length, budget.length,
                    (int(prefix[-1]), ()))  # fmt: skip
        self.ranks = [node.mark[1][-1] for node in tree]
        return draft_of(tree, budget, self.part.name)

    def _children(self, node: Node) -> Iterator[tuple[float, int, Any]]:
        """The successors of a token at the ranks that the static tree has below its path."""
        before, path = node.mark
        for rank, token in enumerate(self.part.table.get(before, ())[: None if self.trees else 1]):
            below = (*path, rank)
            if below in PATHS or not self.trees:
                yield math.log(self.part.hits(rank)), token, (token, below)

    def observe(self, feedback: Feedback) -> None:
        if feedback.draft.source == self.part.name:
            self.part.hits.update_tree(self.ranks, feedback)
        scores: Any = feedback.scores
        best = scores.topk(min(self.part.width, scores.shape[-1]), dim=-1).indices.tolist()
        for token, successors in zip(feedback.fed.tolist(), best, strict=True):
            self.part.table[token] = successors
