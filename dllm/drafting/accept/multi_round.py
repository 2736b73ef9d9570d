"""Multi-round rejection sampling of a tree's siblings."""

from __future__ import annotations

from dataclasses import dataclass

from ..base import ROOT, RULES, AcceptRule, Draft, Outcome
from .chains import SAMPLED, residual
from .rows import Rows
from .traversal import normal, without


@RULES.register(
    "multi_round",
    paper="SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative "
    "Inference and Verification",
    arxiv="2305.09781",
)
@dataclass
class MultiRound(AcceptRule):
    """Test siblings one after the other, each against what the ones before left over."""

    accepts = SAMPLED
    trees = True

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        node = ROOT
        path: list[int] = []
        while True:
            p, chosen = rows.distribution(node), None
            q = draft.q(node) if draft.children(node) else p
            for child in draft.children(node):
                token = int(draft.tokens[child])
                if rows.coin(child) * q[token] < p[token]:
                    chosen = child
                    break
                p = normal(residual(p, q))
                q = without(q, token)
            if chosen is None:
                return Outcome(path, rows.draw(p, node))
            node = chosen
            path.append(node)
