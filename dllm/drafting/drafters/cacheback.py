"""Cacheback: the n-grams used last, and nothing else."""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ..base import DRAFTERS, Budget, Draft, Drafter, Drafting, DraftRequest, Feedback
from ..search.grow import Node, draft_of, grow
from .hits import HitRates

Gram = tuple[int, ...]


class Recent:
    """Leaders of n tokens and followers seen behind each; the least recently used go first."""

    def __init__(self, leaders: int, followers: int) -> None:
        self.leaders, self.followers = leaders, followers
        self.table: OrderedDict[Gram, OrderedDict[Gram, None]] = OrderedDict()

    def add(self, leader: Gram, follower: Gram) -> None:
        known = self.table.setdefault(leader, OrderedDict())
        self.table.move_to_end(leader)
        known[follower] = None
        known.move_to_end(follower)
        if len(known) > self.followers:
            known.popitem(last=False)
        if len(self.table) > self.leaders:
            self.table.popitem(last=False)

    def behind(self, leader: Gram) -> Iterator[Gram]:
        """Followers, the one used last first."""
        yield from reversed(self.table.get(leader, ()))


@DRAFTERS.register(
    "cacheback", paper="Cacheback: Speculative Decoding With Nothing But Cache", arxiv="2511.21699"
)
@dataclass
class Cacheback(Drafter):
    """A tree of the followers that were used last behind the last tokens.

    A table maps every ``leader`` tokens to the runs of ``follower`` tokens seen behind them; it
    holds the ``leaders`` used last, with ``followers`` each, and outlives requests.  The tree takes
    followers of the present leader, then of the leaders at their ends, level by level, up to
    ``nodes`` nodes.  The sizes are this library's; the paper's second, frozen table of a corpus is
    what `learn` fills before the first request.
    """

    leader: int = 2
    follower: int = 3
    leaders: int = 100_000
    followers: int = 4
    nodes: int = 16

    def __post_init__(self) -> None:
        if min(self.leader, self.follower, self.leaders, self.followers, self.nodes) < 1:
            raise ConfigError(
                "cacheback takes numbers of at least 1: leader, follower, leaders, followers, nodes"
            )
        self.recent = Recent(self.leaders, self.followers)
        self.hits = HitRates()  # by rank among the followers of a leader

    def learn(self, tokens: list[int], start: int = 0) -> None:
        """Take in the n-grams of a text that end behind ``start``."""
        n = self.leader + self.follower
        for end in range(max(n, start + 1), len(tokens) + 1):
            middle = end - self.follower
            self.recent.add(tuple(tokens[end - n : middle]), tuple(tokens[middle:end]))

    def open(self, request: DraftRequest) -> Drafting:
        return _Cached(self, request)


class _Cached(Drafting):
    def __init__(self, part: Cacheback, request: DraftRequest) -> None:
        self.part, self.trees, self.known = part, request.trees, 0
        self.ranks: list[int] = []  # of the nodes of the last draft

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        text = prefix.tolist()
        self.part.learn(text, self.known)
        self.known = len(text)
        leader = tuple(text[-self.part.leader :])
        tree = grow(self._children, self.part.nodes, budget.length, (0, leader, ()))
        self.ranks = [node.mark[0] for node in tree]
        return draft_of(tree, budget, self.part.name)

    def _children(self, node: Node) -> Iterator[tuple[float, int, Any]]:
        """The next tokens of the runs that a node stands in, or of those behind it where they have
        ended; marks are the rank of a run, the tokens before and the runs that agree so far."""
        _, before, runs = node.mark
        if not runs:
            behind = self.part.recent.behind(before[-self.part.leader :])
            runs = tuple(enumerate(behind))[: None if self.trees else 1]
        for token in dict.fromkeys(run[0] for _, run in runs):
            same = [(rank, run[1:]) for rank, run in runs if run[0] == token]
            rank, rest = same[0][0], tuple(one for one in same if one[1])
            yield math.log(self.part.hits(rank)), token, (rank, (*before, token), rest)

    def observe(self, feedback: Feedback) -> None:
        if feedback.draft.source == self.part.name:
            self.part.hits.update_tree(self.ranks, feedback)
