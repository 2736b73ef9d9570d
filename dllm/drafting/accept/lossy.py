"""Accept rules that keep tokens which the verifier would not have written: lossy, opt-in.

Their texts are not the verifier's, and nothing bounds how far they drift.  What they emit is
counted: `SpeculativeResult.deviations`.  What a request bans or filters out is never kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from ...core.errors import ConfigError
from ..base import RULES, AcceptRule, Array, Draft, Outcome
from .rows import Rows


@RULES.register("fly", paper="Training-Free Loosely Speculative Decoding: Accepting Semantically "
                "Correct Drafts Beyond Exact Match", arxiv="2511.22972")  # fmt: skip
@dataclass
class FLy(AcceptRule):
    """LOSSY. Keep a token that differs from the verifier's where the verifier hesitates and then
    follows the draft.

    It hesitates where the entropy of its ``top`` (3) most probable tokens, the sum of -p ln p over
    these alone, before temperature and filters, is at least ``entropy`` nats; it follows where it
    agrees with the next ``window`` drafted tokens.  Constants of the paper, whose window of six
    counts the token itself; as in the official code the last six tokens of a draft are never
    relaxed.  vLLM asks for six that follow.
    """

    entropy: float = 0.3
    window: int = 5
    top: int = 3

    lossy = True

    def __post_init__(self) -> None:
        if not self.entropy >= 0 or self.window < 0 or self.top < 1:
            raise ConfigError("fly takes entropy >= 0, window >= 0 and top >= 1")

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        own = [rows.keyed(node - 1) for node in range(len(draft) + 1)]
        same = draft.tokens == own[:-1]
        deviations = 0
        for node in np.flatnonzero(~same).tolist():
            ahead = same[node + 1 : node + 1 + self.window]
            sure = self._hesitation(rows, node - 1) < self.entropy
            banned = not rows.may_follow(node - 1, int(draft.tokens[node]))
            late = len(draft) - node <= self.window + 1
            if sure or banned or late or not ahead.all():
                return Outcome(list(range(node)), own[node], deviations)
            deviations += 1
        return Outcome(list(range(len(draft))), own[-1], deviations)

    def _hesitation(self, rows: Rows, node: int) -> float:
        """Entropy of the most probable tokens after ``node``, in nats."""
        p = rows.logits[node + 1].float().softmax(-1)
        return float(torch.special.entr(p.topk(min(self.top, len(p))).values).sum())


FEATURES = ("log p", "entropy", "log of the largest p", "log of the rank")


@RULES.register("pivot", paper="Reject Only Critical Tokens: Pivot-Aware Speculative Decoding",
                arxiv="2511.00351")  # fmt: skip
@dataclass
class Pivot(AcceptRule):
    """LOSSY. Keep a token that differs from the verifier's unless a classifier calls it pivotal.

    ``path``: what `fit_pivot` wrote.  A token is pivotal where its probability of changing the
    outcome of the task is at least ``threshold``.  The paper trains a light classifier on labelled
    tokens; its features are not reconstructed, these are the verifier's: `FEATURES`.
    """

    path: str = ""
    threshold: float = 0.5
    weights: tuple[float, ...] = field(default=(), repr=False)

    lossy = True

    def __post_init__(self) -> None:
        if not self.weights:
            try:
                self.weights = tuple(json.loads(Path(self.path).read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"rule 'pivot' needs path, a file that fit_pivot wrote; {self.path!r} is none: "
                    f"{error}"
                ) from error
        if len(self.weights) != len(FEATURES) + 1 or not 0 < self.threshold <= 1:
            raise ConfigError(
                f"rule 'pivot' takes {len(FEATURES) + 1} weights and threshold in (0, 1]"
            )

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        deviations = 0
        for node, token in enumerate(draft.tokens.tolist()):
            own = rows.keyed(node - 1)
            if token == own:
                continue
            banned = not rows.may_follow(node - 1, token)
            if banned or (
                _chance(pivot_features(rows, node - 1, token), self.weights) >= self.threshold
            ):
                return Outcome(list(range(node)), own, deviations)
            deviations += 1
        return Outcome(list(range(len(draft))), rows.keyed(len(draft) - 1), deviations)


def pivot_features(rows: Rows, node: int, token: int) -> Array:
    """`FEATURES` of ``token`` after ``node``, (4,)."""
    logp = rows.log_distribution[node + 1].float().log_softmax(-1)
    mine = logp[token]
    rank = 1 + int((logp > mine).sum())
    lowest = float(logp[logp > -torch.inf].min())
    return np.array([max(float(mine), lowest), _entropy(rows, node), float(logp.max()),
                     math.log(rank)])  # fmt: skip


def fit_pivot(
    features: Sequence[Array], pivotal: Sequence[bool], path: str | Path, rounds: int = 50
) -> tuple[float, ...]:
    """Weights of a logistic regression, written to ``path``.

    ``features`` (n, 4) of tokens that differed from the verifier's, and whether the outcome of the
    task changed when the text went on from the token.
    """
    x = np.column_stack([np.asarray(features, np.float64), np.ones(len(features))])
    y, weights = np.asarray(pivotal, np.float64), np.zeros(x.shape[1])
    for _ in range(rounds):  # Newton's method, with a little shrinkage
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        curvature = (x * (p * (1 - p))[:, None]).T @ x + 1e-2 * np.eye(x.shape[1])
        weights = weights + np.linalg.solve(curvature, x.T @ (y - p) - 1e-2 * weights)
    result = tuple(weights.tolist())
    Path(path).write_text(json.dumps(result), encoding="utf-8")
    return result


def _chance(features: Array, weights: Sequence[float]) -> float:
    score = float(np.dot(features, weights[:-1])) + weights[-1]
    return 1 / (1 + math.exp(-min(max(score, -30.0), 30.0)))


def _entropy(rows: Rows, node: int) -> float:
    """Of the verifier's distribution after ``node``, over the logarithm of the vocabulary size."""
    p = rows.log_distribution[node + 1].float().softmax(-1)
    return float(torch.special.entr(p).sum()) / math.log(len(p))
