"""ADED: a tri-gram table of the verifier, and a Monte-Carlo search through it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ..base import DRAFTERS, EMPTY, ROOT, Budget, Draft, Drafter, Drafting, DraftRequest, Feedback
from ..search.grow import Node, draft_of, grow


@dataclass(eq=False)
class _Visited:
    """A node of the search: how often it was visited, and the sum of what was found below."""

    prior: float
    token: int = ROOT
    visits: int = 0
    value: float = 0.0
    children: list[_Visited] = field(default_factory=list)
    expanded: bool = False


@DRAFTERS.register(
    "aded", paper="Adaptive Draft-Verification for Efficient Large Language Model Decoding",
    arxiv="2407.12021",
)  # fmt: skip
@dataclass
class ADED(Drafter):
    """Search a table of what the verifier thinks follows two tokens.

    The table keeps, for each pair of tokens, the ``width`` most probable successors of the
    verifier's last forward over it, mixed with what it held by ``rho``; it outlives requests.
    Every round ``searches`` descents of at most ``depth`` tokens choose by the mean probability
    found below a token plus ``explore`` times its probability times sqrt(visits above) / (1 +
    visits); the ``nodes`` most visited tokens are drafted as a tree, the most visited path where
    only chains are taken.  The published rule; its constants are this library's.
    """

    width: int = 8
    searches: int = 64
    depth: int = 6
    explore: float = 1.0
    nodes: int = 16
    rho: float = 0.5

    def __post_init__(self) -> None:
        if min(self.width, self.searches, self.depth, self.nodes) < 1 or not 0 < self.rho <= 1:
            raise ConfigError(
                "aded takes width, searches, depth and nodes of at least 1 and rho in (0, 1]"
            )
        self.table: dict[tuple[int, int], dict[int, float]] = {}

    def open(self, request: DraftRequest) -> Drafting:
        return _Searching(self, request.trees)

    def learn(self, pair: tuple[int, int], tokens: list[int], chances: list[float]) -> None:
        """Mix a distribution of the verifier into what is known of ``pair``."""
        known = self.table.get(pair)
        if known is None:
            self.table[pair] = dict(zip(tokens, chances, strict=True))
            return
        mixed = {token: (1 - self.rho) * chance for token, chance in known.items()}
        for token, chance in zip(tokens, chances, strict=True):
            mixed[token] = mixed.get(token, 0.0) + self.rho * chance
        best = sorted(mixed.items(), key=lambda item: (-item[1], item[0]))[: self.width]
        self.table[pair] = dict(best)


class _Searching(Drafting):
    def __init__(self, part: ADED, trees: bool) -> None:
        self.part, self.trees = part, trees
        self.before = -1  # the token in front of those that were fed last

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        if len(prefix) < 2 or (int(prefix[-2]), int(prefix[-1])) not in self.part.table:
            return EMPTY
        root = _Visited(1.0, int(prefix[-1]))
        for _ in range(self.part.searches):
            self._descend(root, int(prefix[-2]), min(self.part.depth, budget.length))
        return self._draft(root, budget)

    def _descend(self, root: _Visited, before: int, depth: int) -> None:
        """One search: down by score, then the value of what was reached up again."""
        path, node, value = [root], root, 1.0
        for _ in range(depth):
            if not node.expanded:
                known = self.part.table.get((before, node.token), {})
                node.children = [_Visited(chance, token) for token, chance in known.items()]
                node.expanded = True
            if not node.children:
                break
            above = math.sqrt(max(1, node.visits))
            before, node = node.token, max(node.children, key=lambda c: self._score(c, above))
            value *= node.prior
            path.append(node)
            if node.visits == 0:
                break
        for one in path:
            one.visits += 1
            one.value += value

    def _score(self, node: _Visited, above: float) -> float:
        mean = node.value / node.visits if node.visits else 0.0
        return mean + self.part.explore * node.prior * above / (1 + node.visits)

    def _draft(self, root: _Visited, budget: Budget) -> Draft:
        """The most visited nodes; a parent has at least the visits of its children."""

        def children(node: Node) -> list[tuple[float, int, _Visited]]:
            found = [(math.log(c.prior), c.token, c) for c in node.mark.children if c.visits]
            best = sorted(found, key=lambda one: (-one[2].visits, -one[0]))
            return best if self.trees else best[:1]

        tree = grow(children, self.part.nodes, self.part.depth, root,
                    first=lambda node: node.mark.visits + math.exp(node.score) / 2)  # fmt: skip
        return draft_of(tree, budget, self.part.name)

    def observe(self, feedback: Feedback) -> None:
        scores: Any = feedback.scores
        best = scores.float().softmax(-1).topk(min(self.part.width, scores.shape[-1]), dim=-1)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        fed, draft = feedback.fed.tolist(), feedback.draft
        for row, (tokens, chances) in enumerate(rows):
            # row 0 follows the last committed token, row i + 1 follows node i of the draft
            parent = draft.parent(row - 1) if row else None
            before = self.before if parent is None else fed[parent + 1]
            if before >= 0:
                self.part.learn((before, fed[row]), tokens, chances)
        self.before = ([fed[0], *feedback.emitted])[-2]
