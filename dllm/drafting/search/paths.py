"""Chains that also read well left to right: DiffuSpec's path search, and the best of several."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ...errors import ConfigError, UnknownNameError
from ..base import ROOT, Draft
from .chains import Search, SearchContext, register
from .marginals import Lattice, Marginals
from .proxies import Proxy

DIFFUSPEC = "DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding"
SCORES = ("proxy", "verifier")


class Hypothesis(NamedTuple):
    """A path through the first columns of a lattice."""

    tokens: tuple[int, ...]
    score: float
    state: Any
    done: bool


# What a step of the search may become: sorts the best first, of equals the lower token ids.
Growth = tuple[float, tuple[int, ...], int, Hypothesis]
ENDED = -1  # in place of a token: the path has ended before


def beam_search(
    lattice: Lattice, prefix: Sequence[int], proxy: Proxy, weight: float, beam: int
) -> Hypothesis:
    """The best path; all paths are compared over the whole depth of the lattice.

    A path that ended keeps adding the drafter's log-probability of an end token: otherwise early
    ends win for collecting fewer terms (reconstructed).  ``weight`` is the drafter's share of the
    score, the proxy has the rest.
    """
    hypotheses = [Hypothesis((), 0.0, proxy.start(prefix), False)]
    for depth, column in enumerate(lattice.columns):
        tokens = [candidate.token for candidate in column]
        grown: list[Growth] = []
        for h in hypotheses:
            if h.done:
                score = h.score + weight * lattice.end_logp[depth]
                grown.append((-score, h.tokens, ENDED, h))
                continue
            causal = proxy.logprobs(h.state, tokens) if weight < 1 else [0.0] * len(tokens)
            for candidate, other in zip(column, causal, strict=True):
                score = h.score + weight * candidate.logp + (1 - weight) * other
                grown.append((-score, h.tokens, candidate.token, h))
        best = heapq.nsmallest(beam, grown)
        hypotheses = [_settle(growth, proxy, lattice.stop_ids) for growth in best]
        if all(h.done for h in hypotheses):
            depth_left = range(depth + 1, len(lattice.columns))
            rest = sum(lattice.end_logp[i] for i in depth_left)
            first = hypotheses[0]
            return Hypothesis(first.tokens, first.score + weight * rest, None, True)
    return hypotheses[0]


def _settle(growth: Growth, proxy: Proxy, stop_ids: frozenset[int]) -> Hypothesis:
    """The hypothesis that survived; only now the proxy advances."""
    minus, tokens, token, parent = growth
    if token == ENDED:
        return Hypothesis(tokens, -minus, None, True)
    ends = token in stop_ids
    state = None if ends else proxy.advance(parent.state, token)
    return Hypothesis((*tokens, token), -minus, state, ends)


@register("cps", paper=DIFFUSPEC, arxiv="2510.02358")
@dataclass
class CausalPathSearch(Search):
    """Beam search through the pruned lattice for the chain that also reads well left to right.

    ``mass``, ``cap``: pruning; ``beam``; ``weight``: share of the drafter's log-probability in the
    score, the rest is the proxy's.  ``coupled``: at temperature > 0 search the distributions with
    the verifier's noise added.
    """

    mass: float = 0.8
    cap: int = 15
    beam: int = 3
    weight: float = 0.5
    coupled: bool = True

    def __post_init__(self) -> None:
        if not (0 < self.mass <= 1 and 0 < self.weight <= 1 and min(self.cap, self.beam) >= 1):
            raise ConfigError("cps takes 0 < mass <= 1, 0 < weight <= 1, cap >= 1 and beam >= 1")

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        lattice = context.shown(marginals, length, self.coupled).lattice(
            length, self.mass, self.cap
        )
        best = beam_search(lattice, context.prefix.tolist(), context.proxy, self.weight, self.beam)
        return self.draft(marginals, best.tokens)


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
