"""SpecDiff-2: the best of several sampled chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...errors import ConfigError, UnknownNameError
from ..base import ROOT, Draft
from .chains import Search, SearchContext, register
from .cps import SCORES
from .marginals import Marginals
from .proxies import Proxy


@register("best_of_k", paper="SpecDiff-2: Scaling Diffusion Drafter Alignment For Faster "
          "Speculative Decoding", arxiv="2511.00606")  # fmt: skip
@dataclass
class BestOfK(Search):
    """The best of ``k`` sampled chains; the argmax chain is one of them.

    ``score``: "proxy", the score of `cps` with ``weight``, or "verifier": all chains go to the
    verifier as one tree, and the accept rule finds the best of them.
    """

    k: int = 8
    weight: float = 0.5
    score: str = "proxy"

    def __post_init__(self) -> None:
        if self.k < 1 or not 0 <= self.weight <= 1:
            raise ConfigError("best_of_k takes k >= 1 and 0 <= weight <= 1")
        if self.score not in SCORES:
            raise UnknownNameError("score", self.score, SCORES)

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        length = length if marginals.end is None else min(length, marginals.end + 1)
        log_q = marginals.log_q[:length]
        chains = [marginals.argmax[:length].tolist()]
        for i in range(1, self.k):
            noise = marginals.noise(context.draft_key, length, context.round * self.k + i)
            chains.append((log_q + noise).argmax(-1).tolist())
        if self.score == "verifier":
            tokens, parents, depths = merged(chains)
            return Draft(
                np.asarray(tokens, np.int64), np.asarray(parents, np.int64),
                confidence=marginals.confidence[depths], end=marginals.end, source=self.name,
            )  # fmt: skip
        rows = torch.arange(length, device=log_q.device)
        scores = [
            self.weight * float(log_q[rows, torch.tensor(c, device=log_q.device)].sum())
            + (1 - self.weight) * chain_logprob(context.proxy, context.prefix.tolist(), c)
            for c in chains
        ]
        best = max(range(len(chains)), key=lambda i: (scores[i], -i))
        return self.draft(marginals, chains[best])


def merged(chains: Sequence[Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents and depths of the tree of all beginnings of ``chains``."""
    known: dict[tuple[int, ...], int] = {(): ROOT}
    for chain in chains:
        for length in range(1, len(chain) + 1):
            known.setdefault(tuple(chain[:length]), len(known) - 1)
    nodes = list(known)[1:]
    return (
        [node[-1] for node in nodes],
        [known[node[:-1]] for node in nodes],
        [len(node) - 1 for node in nodes],
    )


def chain_logprob(proxy: Proxy, prefix: Sequence[int], tokens: Sequence[int]) -> float:
    """The proxy's log-probability of a chain."""
    state, total = proxy.start(prefix), 0.0
    for token in tokens:
        total += proxy.logprobs(state, [token])[0]
        state = proxy.advance(state, token)
    return total
