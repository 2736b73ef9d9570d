"""Token Recycling: the verifier's discarded candidates, kept as a table of likely successors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...canvas import IntArray
from ...errors import ConfigError
from ..base import (
    DRAFTERS,
    EMPTY,
    ROOT,
    Budget,
    Draft,
    Drafter,
    Drafting,
    DraftRequest,
    Feedback,
)
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
        last = int(prefix[-1])
        if last not in self.part.table:
            return EMPTY
        return self._tree(last, budget) if self.trees else self._chain(last, budget)

    def _chain(self, token: int, budget: Budget) -> Draft:
        tokens: list[int] = []
        while len(tokens) < budget.length and token in self.part.table:
            token = self.part.table[token][0]
            tokens.append(token)
        self.ranks = [0] * len(tokens)
        return budget.chain(tokens, [self.part.hits(0)] * len(tokens), self.part.name)

    def _tree(self, last: int, budget: Budget) -> Draft:
        chances = [math.prod(map(self.part.hits, path)) for path in PATHS]
        nodes: dict[tuple[int, ...], int] = {(): ROOT}
        tokens: list[int] = []
        parents: list[int] = []
        alive: list[float] = []
        self.ranks = []
        # parents stay in front: they are no less probable, and sorting keeps the order of equals
        for chance, path in sorted(zip(chances, PATHS, strict=True), key=lambda pair: -pair[0]):
            above = nodes.get(path[:-1])
            if above is None or len(path) > budget.length:
                continue
            parent_token = last if above == ROOT else tokens[above]
            successors = self.part.table.get(parent_token, [])
            if path[-1] < len(successors):
                nodes[path] = len(tokens)
                tokens.append(successors[path[-1]])
                parents.append(above)
                alive.append(chance)
                self.ranks.append(path[-1])
        return budget.tree(tokens, parents, alive, self.part.name)

    def observe(self, feedback: Feedback) -> None:
        if feedback.draft.source == self.part.name:
            self.part.hits.update_tree(self.ranks, feedback)
        scores: Any = feedback.scores
        best = scores.topk(min(self.part.width, scores.shape[-1]), dim=-1).indices.tolist()
        for token, successors in zip(feedback.fed.tolist(), best, strict=True):
            self.part.table[token] = successors
