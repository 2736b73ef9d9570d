"""Block verification: the draft is judged as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..base import AcceptRule, Draft, Outcome
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
                threshold = share / (share + 1.0 - weight) if share > 0 else 0.0
            if rows.coin(i - 1) < threshold:
                best, best_weight = i, weight
        p = rows.distribution(best - 1)
        if best < len(draft):
            p = residual(best_weight * p, draft.q(best - 1), otherwise=p)
        return Outcome(list(range(best)), rows.draw(p, best - 1))
