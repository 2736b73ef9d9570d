"""SuffixDecoding: continue suffixes that were seen before, here or in earlier requests."""

import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ..base import DRAFTERS, EMPTY, Budget, Draft, Drafter, Drafting, DraftRequest, Feedback
from ..search.grow import Node, draft_of, grow
from .history import BORDER, History
from .hits import HitRates


@dataclass
class Continuation:
    """The tree that may follow a matched suffix of ``size`` tokens, most probable nodes first;
    continuations are compared by the sum of the products of empirical shares."""

    size: int
    tree: list[Node]

    @property
    def score(self) -> float:
        return sum(node.alive for node in self.tree)


@DRAFTERS.register("suffix", paper="SuffixDecoding: Extreme Speculative Decoding for Emerging AI "
                   "Applications", arxiv="2411.04975")  # fmt: skip
@dataclass
class SuffixDecoding(Drafter):
    """Follow what came after suffixes of every length, as the tree with most expected tokens.

    One history holds the present text, one the outputs of the last ``requests`` sequences.  For
    each suffix of up to ``depth`` - 1 tokens that occurred before, the most probable continuations
    are grown, at most ``factor`` nodes per matched token and none whose product of empirical shares
    is below ``least``; of all lengths and both histories the one with the largest sum of these
    products is drafted.  ``tree=False``, or a verifier that takes chains only: the most frequent
    continuation.  Both are built in linear time while prompts are read.
    """

    depth: int = 64
    factor: float = 1.0
    least: float = 0.1
    requests: int = 1_000
    tree: bool = True

    def __post_init__(self) -> None:
        known = 0 < self.factor < math.inf and 0 < self.least <= 1
        if not known or self.depth < 2 or self.requests < 0:
            raise ConfigError(
                "suffix takes depth >= 2, a finite factor > 0, 0 < least <= 1 and requests >= 0"
            )
        self.shared, self.hits = History(), HitRates()
        self.ends: deque[int] = deque()  # where the kept outputs end in `shared`
        self.lock = threading.Lock()

    def open(self, request: DraftRequest) -> Drafting:
        return _Suffixes(self, request)

    def remember(self, text: list[int]) -> None:
        """Keep an output for later requests; the oldest makes room."""
        if self.requests == 0 or not text:
            return
        with self.lock:
            before = self.shared.size
            self.shared.extend([*text, BORDER])
            self.ends.append(self.shared.size)
            if len(self.ends) > self.requests:
                self.shared.forget(self.ends.popleft())
                moved = before + len(text) + 1 - self.shared.size
                self.ends = deque(end - moved for end in self.ends)


class _Suffixes(Drafting):
    def __init__(self, part: SuffixDecoding, request: DraftRequest) -> None:
        self.part, self.own = part, History()
        self.start, self.trees = len(request.prompt), request.trees and part.tree
        self.text: list[int] = request.prompt.tolist()
        self.own.extend(self.text)
        self.size = 0  # matched tokens of the last draft

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        self.text = prefix.tolist()
        self.own.extend(self.text[self.own.size :])
        with self.part.lock:
            found = [self._best(texts, budget.length) for texts in (self.own, self.part.shared)]
        best = max(filter(None, found), key=lambda one: one.score, default=None)
        return EMPTY if best is None else self._draft(best, budget)

    def _best(self, history: History, length: int) -> Continuation | None:
        """The continuation with the largest score, of suffixes of all lengths."""
        best = None
        for size, places in history.matches(self.text, self.part.depth - 1):
            most = max(1, int(self.part.factor * size))
            result = self._grow(history, places, size, most, length)
            if result.tree and (best is None or result.score >= best.score):
                best = result
        return best

    def _grow(
        self, history: History, places: IntArray, size: int, most: int, length: int
    ) -> Continuation:
        """The ``most`` most probable nodes behind ``places``, at depths below ``length``."""
        least = math.log(self.part.least) - 1e-9

        def children(node: Node) -> Iterator[tuple[float, int, IntArray]]:
            following = history.following(node.mark)
            tokens, counts = np.unique(following[following != BORDER], return_counts=True)
            order = np.lexsort((tokens, -counts))[: None if self.trees else 1]
            for i in order.tolist():
                share = math.log(counts[i] / counts.sum())
                if node.score + share < least:
                    return
                yield share, int(tokens[i]), node.mark[following == tokens[i]] + 1

        return Continuation(size, grow(children, most, length, places))

    def _draft(self, best: Continuation, budget: Budget) -> Draft:
        """Its shares times how often drafts behind so many matched tokens were right."""
        self.size, rate = best.size, math.log(self.part.hits(best.size))
        tree = [
            node._replace(chance=node.chance + rate, score=node.score + rate * (1 + node.depth))
            for node in best.tree
        ]
        return draft_of(tree, budget, self.part.name)

    def observe(self, feedback: Feedback) -> None:
        # also when another drafter was asked
        self.text += feedback.emitted
        draft = feedback.draft
        if draft.source == self.part.name and len(draft):
            longest = 1 + max(draft.depth(node) for node in range(len(draft)))
            self.part.hits.update_chain(self.size, feedback.accepted, longest)

    def close(self) -> None:
        self.part.remember(self.text[self.start :])
