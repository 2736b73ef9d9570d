"""Drafts read off with a head that looks at the token before: a chain, or the best prefixes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...canvas import IntArray
from ..base import ROOT, Array, Distribution, Draft
from ..search.marginals import largest
from .heads import Bias, Floats, Sure

BRANCHES = 8  # children of a node that are considered
CANDIDATES = 64  # most probable tokens of a row that a head may choose from


@dataclass(frozen=True, eq=False)
class Walk:
    """A block's rows: of every row the ``logits`` (K, m) and ``ids`` (K, m) of its candidates, and
    the head's ``bias`` behind a token; ``noise`` (K, m) is the verifier's at ``temperature``;
    ``sure`` is how confident a head is, where one says so."""

    bias: Bias
    anchor: int
    logits: Floats
    ids: IntArray
    temperature: float = 0.0
    noise: Floats | None = None
    sure: Sure | None = None

    def after(self, state: Any, token: int, depth: int) -> tuple[Floats, Any]:
        """Log-probabilities (m,) of the candidates of row ``depth`` behind ``token``, and what the
        head remembers then."""
        added, state = self.bias(state, token, depth)
        x = self.logits[depth] + added
        if self.temperature > 0:
            x = x / self.temperature
        if self.noise is not None:
            x = x + self.noise[depth]
        x = x - x.max()
        result: Floats = x - np.log(np.exp(x).sum())
        return result, state

    def chain(self, length: int, uniforms: Array | None = None, width: int = 0) -> Draft:
        """The most probable token of every row, given the ones before.

        With ``uniforms`` (K,) in [0, 1) every token is drawn instead, where the distribution's sum
        passes that number, and the draft brings its distributions over ``width`` ids: what `ratio`
        and `block` divide by.
        """
        tokens: list[int] = []
        sure: list[float] = []
        rows = min(length, len(self.logits))
        drawn = None if uniforms is None else np.full((rows + 1, width), -np.inf, np.float32)
        token, state = self.anchor, None
        for depth in range(rows):
            log_q, state = self.after(state, token, depth)
            q = np.exp(log_q.astype(np.float64))
            if uniforms is None or drawn is None:
                best = int(q.argmax())
            else:
                sums = q.cumsum()
                best = int(np.searchsorted(sums, uniforms[depth] * sums[-1], side="right"))
                drawn[depth, self.ids[depth]] = log_q
            sure.append(float(q.max()) if self.sure is None else self.sure(token, depth))
            token = int(self.ids[depth, best])
            tokens.append(token)
        kind = Distribution.POINT if drawn is None else Distribution.CONDITIONALS
        return Draft(np.asarray(tokens, np.int64), None, kind, drawn, np.asarray(sure),
                     source="walk")  # fmt: skip

    def tree(self, length: int, nodes: int, size: Callable[[Array], int] = len) -> Draft:
        """The ``nodes`` most probable prefixes of at most ``length`` tokens, as a tree; ``size``
        says how many of them to keep, given their probabilities (n,), which fall.

        Best first, as DDTree (arXiv 2604.12989) does with marginals; here the probability of a
        token is that behind its parent.
        """
        depth_limit = min(length, len(self.logits))
        heap: list[tuple[float, int, int, int, float]] = []
        tokens: list[int] = []
        parents: list[int] = []
        sure: list[float] = []
        alive: list[float] = []
        behind: dict[int, Any] = {}  # node -> what the head remembers behind it

        def open_children(token: int, node: int, depth: int, score: float) -> None:
            before = None if node == ROOT else behind[parents[node]]
            log_q, behind[node] = self.after(before, token, depth)
            at = np.argpartition(log_q, -BRANCHES)[-BRANCHES:] if len(log_q) > BRANCHES else (
                np.arange(len(log_q))
            )  # fmt: skip
            for value, child in zip(log_q[at].tolist(), self.ids[depth, at].tolist(), strict=True):
                heapq.heappush(heap, (-(score + value), node, depth, child, value))

        if depth_limit:
            open_children(self.anchor, ROOT, 0, 0.0)
        while heap and len(tokens) < nodes:
            minus, parent, depth, token, value = heapq.heappop(heap)
            tokens.append(token)
            parents.append(parent)
            sure.append(value)
            alive.append(-minus)
            if depth + 1 < depth_limit and len(tokens) < nodes:
                open_children(token, len(tokens) - 1, depth + 1, -minus)
        kept = size(np.exp(alive))
        return Draft(np.asarray(tokens[:kept], np.int64), np.asarray(parents[:kept], np.int64),
                     confidence=np.exp(sure[:kept]), source="walk_tree")  # fmt: skip


def candidates(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows (K, v) the largest logits (K, m) in float32, in order, and their places (K, m)."""
    values, at = largest(logits.float(), min(CANDIDATES, logits.shape[1]))
    values, order = values.sort(descending=True, stable=True)
    return values, at.gather(1, order)
