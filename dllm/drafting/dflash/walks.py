"""Drafts read off with a head that looks at the token before: a chain, or the best prefixes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ..base import ROOT, Draft
from ..search.marginals import Marginals
from .heads import WalkHead

BRANCHES = 8  # children of a node that are considered
CANDIDATES = 64  # most probable tokens of a row that a head may choose from


@dataclass(frozen=True, eq=False)
class Walk:
    """A block's rows: ``hidden`` (K, H), and of every row the ``logits`` (K, m) and places ``at``
    (K, m) of its candidates, largest first, see `candidates`; ``distribution`` makes a
    distribution of logits and places at a depth, with the verifier's noise where there is any."""

    head: WalkHead
    anchor: int
    hidden: torch.Tensor
    logits: torch.Tensor
    at: torch.Tensor
    distribution: Callable[[torch.Tensor, torch.Tensor, int], Marginals]

    def after(self, token: int, depth: int) -> Marginals:
        """The distribution of row ``depth`` behind ``token``."""
        at = self.at[depth]
        row = self.head.after(token, self.hidden[depth].float(), self.logits[depth], at)
        return self.distribution(row, at, depth)

    def chain(self, length: int) -> Draft:
        """The most probable token of every row, given the one before."""
        tokens: list[int] = []
        sure: list[float] = []
        for depth in range(min(length, len(self.logits))):
            given = self.after(tokens[-1] if tokens else self.anchor, depth)
            tokens.append(int(given.argmax[0]))
            sure.append(float(given.confidence[0]))
        return Draft(np.asarray(tokens, np.int64), confidence=np.asarray(sure), source="walk")

    def tree(self, length: int, nodes: int) -> Draft:
        """The ``nodes`` most probable prefixes of at most ``length`` tokens, as a tree.

        Best first, as DDTree (arXiv 2604.12989) does with marginals; here the probability of a
        token is that behind its parent.
        """
        depth_limit = min(length, len(self.logits))
        heap: list[tuple[float, int, int, int, float]] = []
        tokens: list[int] = []
        parents: list[int] = []
        sure: list[float] = []

        def open_children(token: int, parent: int, depth: int, score: float) -> None:
            given = self.after(token, depth)
            values, at = given.log_q[0].topk(min(BRANCHES, given.log_q.shape[1]))
            ids = at if given.ids is None else given.ids[0][at]
            for value, child in zip(values.tolist(), ids.tolist(), strict=True):
                heapq.heappush(heap, (-(score + value), parent, depth, child, value))

        if depth_limit:
            open_children(self.anchor, ROOT, 0, 0.0)
        while heap and len(tokens) < nodes:
            minus, parent, depth, token, value = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            sure.append(float(np.exp(value)))
            if depth + 1 < depth_limit:
                open_children(token, len(tokens) - 1, depth + 1, -minus)
        return Draft(np.asarray(tokens, np.int64), np.asarray(parents, np.int64),
                     confidence=np.asarray(sure), source="walk_tree")  # fmt: skip


def candidates(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows (K, v) the largest logits (K, m) in float32 and their places (K, m)."""
    values, at = logits.float().topk(min(CANDIDATES, logits.shape[1]))
    return values, at
