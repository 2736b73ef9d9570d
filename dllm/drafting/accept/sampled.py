"""Accept rules for tokens that were drawn from a known distribution: chains judged as a whole, and
trees whose siblings were drawn without replacement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..base import ROOT, RULES, AcceptRule, Array, Draft, Outcome
from .chains import SAMPLED, register, residual
from .rows import Rows


@register(
    "block",
    paper="Block Verification Accelerates Speculative Decoding",
    arxiv="2403.10444",
)
@dataclass
class Block(AcceptRule):
    """Judge the sampled chain as a whole: never accepts fewer tokens than `ratio` on average."""

    accepts = SAMPLED

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        weight, best, best_weight = 1.0, 0, 1.0
        for i, token in enumerate(draft.tokens.tolist(), 1):
            p, q = rows.distribution(i - 2), draft.q(i - 2)
            weight = min(1.0, weight * p[token] / q[token])
            threshold = weight
            if i < len(draft):
                share = float(
                    np.maximum(weight * rows.distribution(i - 1) - draft.q(i - 1), 0.0).sum()
                )
                threshold = share / (share + (1.0 - weight)) if share > 0 else 0.0
            if rows.coin(i - 1) < threshold:
                best, best_weight = i, weight
        p = rows.distribution(best - 1)
        if best < len(draft):
            p = residual(best_weight * p, draft.q(best - 1), otherwise=p)
        return Outcome(list(range(best)), rows.draw(p, best - 1))


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
                weight = left / (left + (1.0 - weight)) if left > 0 else 0.0
            q = without(q, token)
        if node == ROOT or rows.coin(node) < weight:
            return Outcome(draft.path(node), rows.draw(p, node))
        return None


def without(q: Array, token: int) -> Array:
    """The distribution of the next sibling: ``token`` is taken."""
    rest = q.copy()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else rest
