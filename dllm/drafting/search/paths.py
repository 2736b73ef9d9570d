"""Chains that also read well left to right: DiffuSpec's path search."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.errors import ConfigError
from ..base import Draft
from .chains import Search, SearchContext, register
from .marginals import Lattice, Marginals
from .proxies import NGram

DIFFUSPEC = "DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding"


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
    lattice: Lattice, prefix: Sequence[int], proxy: NGram, weight: float, beam: int
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
            break  # what the rest adds is the same for all
    return hypotheses[0]


def _settle(growth: Growth, proxy: NGram, stop_ids: frozenset[int]) -> Hypothesis:
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
    score, the rest is the proxy's.  ``coupled``: at temperature > 0 with the verifier's noise.
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
