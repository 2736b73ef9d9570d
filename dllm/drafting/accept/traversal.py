"""Accept rules for trees whose siblings were drawn without replacement from a known
distribution.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..base import ROOT, RULES, AcceptRule, Array, Draft, Outcome
from .chains import SAMPLED
from .rows import Rows


@RULES.register(
    "traversal",
    paper="Traversal Verification for Speculative Tree Decoding",
    arxiv="2505.12398",
)
@dataclass
class Traversal(AcceptRule):
    """Judge leaves first, then their parents; equals `block` on a chain."""

    accepts = SAMPLED
    trees = True

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        result = self._visit(rows, draft, ROOT, 1.0)
        assert result is not None, "the root is always accepted"
        return result

    def _visit(self, rows: Rows, draft: Draft, node: int, weight: float) -> Outcome | None:
        p, children = rows.distribution(node), draft.children(node)
        q = draft.q(node) if children else p
        for child in children:
            token = int(draft.tokens[child])
            below = min(1.0, weight * p[token] / q[token])
            result = self._visit(rows, draft, child, below)
            if result is not None:
                return result
            excess = np.maximum(weight * p - q, 0.0)
            left = float(excess.sum())
            if left > 0:
                p = excess / left
            if node != ROOT:
                weight = left / (left + 1.0 - weight) if left > 0 else 0.0
            q = without(q, token)
        if node == ROOT or rows.coin(node) < weight:
            return Outcome(draft.path(node), rows.draw(p, node))
        return None


def normal(distribution: Array) -> Array:
    """The distribution scaled to sum to one."""
    scaled: Array = distribution / distribution.sum()
    return scaled


def without(q: Array, token: int) -> Array:
    """The distribution of the next sibling: ``token`` is taken."""
    rest = q.copy()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else rest
