"""Accept rules for chains, and the walk, which takes any tree.

Each is lossless for the distributions it `accepts`: the emitted tokens have exactly the
distribution of plain decoding with the verifier.  After full acceptance every rule emits one more
token from the verifier's last row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..base import ROOT, RULES, AcceptRule, Array, Distribution, Draft, Outcome
from .rows import Rows

register = RULES.register
SAMPLED = frozenset({Distribution.MARGINALS})


def walk(draft: Draft, emit: Callable[[int], int]) -> Outcome:
    """Go down as long as the emitted token is a child: lossless for any tree built in any way."""
    node = ROOT
    path: list[int] = []
    while True:
        token = emit(node)
        below = [child for child in draft.children(node) if draft.tokens[child] == token]
        if not below:
            return Outcome(path, token)
        node = below[0]
        path.append(node)


@register("greedy")
@dataclass
class Greedy(AcceptRule):
    """Keep tokens while they are the verifier's most probable ones; for temperature 0."""

    trees = True

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        return walk(draft, rows.greedy)


@register(
    "keyed",
    paper="Coupling without Communication and Drafter-Invariant Speculative Decoding",
    arxiv="2408.07978",
)
@dataclass
class Keyed(AcceptRule):
    """Keep tokens while they are the ones that plain sampling with this seed emits.

    The output is the same tokens, not only the same distribution, whatever the drafter does.  A
    token is kept as often as by any rule that knows no distribution of the draft: with the
    verifier's probability of it.
    """

    trees = True

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        return walk(draft, rows.keyed)


@register("ratio", paper="Fast Inference from Transformers via Speculative Decoding",
          arxiv="2211.17192")  # fmt: skip
@dataclass
class Ratio(AcceptRule):
    """Keep a sampled token with probability p / q, else draw from the positive part of p - q."""

    accepts = SAMPLED

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        path: list[int] = []
        for node, token in enumerate(draft.tokens.tolist()):
            p, q = rows.distribution(node - 1), draft.q(node - 1)
            if rows.coin(node) * q[token] >= p[token]:
                return Outcome(path, rows.draw(residual(p, q), node - 1))
            path.append(node)
        return Outcome(path, rows.draw(rows.distribution(len(draft) - 1), len(draft) - 1))


@register("block", paper="Block Verification Accelerates Speculative Decoding", arxiv="2403.10444")
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


def residual(p: Array, q: Array, otherwise: Array | None = None) -> Array:
    """The positive part of p - q, not normalised.  Where nothing is left, which happens only by
    rounding, it is ``otherwise`` (default ``p``)."""
    rest = np.maximum(p - q, 0.0)
    return rest if rest.sum() > 0 else (p if otherwise is None else otherwise)
