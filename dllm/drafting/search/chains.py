"""From marginals to a draft: chains read off position by position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from ...canvas import IntArray
from ...errors import ConfigError
from ...registry import Registry
from ..base import ROOT, Distribution, Draft, DraftPart
from .marginals import Marginals
from .proxies import Proxy, Uniform


@dataclass(frozen=True)
class SearchContext:
    """What a search may use besides the marginals: the committed ``prefix``, a causal ``proxy``,
    the temperature, the key of the verifier's emission noise and that of the drafter's own, and
    the number of the round."""

    prefix: IntArray
    proxy: Proxy = field(default_factory=Uniform)
    temperature: float = 0.0
    noise_key: tuple[int, int] = (0, 0)
    draft_key: tuple[int, int] = (0, 3)
    round: int = 0

    def shown(self, marginals: Marginals, length: int, coupled: bool) -> Marginals:
        """The distributions to search: with the verifier's noise where it samples and the search
        wants it.

        Both sides then prefer the same tokens, and no probability has to travel.
        """
        if self.temperature > 0 and coupled:
            return marginals.perturbed(self.noise_key, length)
        return marginals


@dataclass
class Search(DraftPart):
    """Finds a draft in marginals.  ``distribution`` is that of its tokens."""

    distribution: ClassVar[Distribution] = Distribution.POINT

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        """A chain of at most ``length`` tokens, or a tree of at most that depth."""
        raise NotImplementedError

    def draft(self, marginals: Marginals, tokens: object, **more: object) -> Draft:
        """A chain with what controllers want to know of it."""
        array = np.asarray(tokens, np.int64)
        return Draft(array, confidence=marginals.confidence[: len(array)], end=marginals.end,
                     source=self.name, **more)  # type: ignore[arg-type]  # fmt: skip


SEARCHES: Registry[Search] = Registry("search")
register = SEARCHES.register


@register("argmax")
@dataclass
class Argmax(Search):
    """The most probable token of every position, whatever stands beside it."""

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        return self.draft(marginals, marginals.argmax[:length])


@register("coupled", paper="Coupling without Communication and Drafter-Invariant Speculative "
          "Decoding", arxiv="2408.07978")  # fmt: skip
@dataclass
class Coupled(Search):
    """Sample with the verifier's own noise, so that both draw the same token where they can.

    At temperature 0 there is no noise, and this is `argmax`.
    """

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        shown = context.shown(marginals, length, coupled=True)
        return self.draft(marginals, shown.argmax[:length])


@register("sample")
@dataclass
class Sample(Search):
    """Draw every token from its marginal: the only chain that `ratio` and `block` can judge."""

    distribution = Distribution.MARGINALS

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        noise = marginals.noise(context.draft_key, length, context.round)
        tokens = (marginals.log_q[:length] + noise).argmax(-1).cpu().numpy()
        log_q = marginals.log_q[:length].cpu().numpy()
        return self.draft(marginals, tokens, distribution=self.distribution, log_q=log_q)


@register("sample_tree")
@dataclass
class SampleTree(Search):
    """Draw children without replacement: ``branching`` of them per node, level by level."""

    distribution = Distribution.MARGINALS
    branching: tuple[int, ...] = (3, 2, 1, 1)

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise ConfigError("branching is a tuple of positive numbers, e.g. (3, 2, 1)")

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        seed, stream = context.draft_key
        tokens: list[int] = []
        parents: list[int] = []
        level = [ROOT]
        for depth, width in enumerate(self.branching[:length]):
            below: list[int] = []
            for node in level:
                # sorting by perturbed log-probability draws without replacement, in order; every
                # node has noise of its own
                noisy = marginals.log_q[depth] + _noise(marginals, seed, stream, context, node)
                width_here = min(width, int((noisy > -torch.inf).sum()))
                for token in noisy.topk(width_here).indices.tolist():
                    below.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
            level = below
        log_q = marginals.log_q[: len(self.branching)].cpu().numpy()
        depths = _depths(parents)
        return Draft(
            np.asarray(tokens, np.int64), np.asarray(parents, np.int64), self.distribution, log_q,
            marginals.confidence[depths], marginals.end, self.name,
        )  # fmt: skip


@register("delayed_tree", paper="Dynamic Delayed Tree Expansion For Improved Multi-Path "
          "Speculative Decoding", arxiv="2602.16994")  # fmt: skip
@dataclass
class DelayedTree(SampleTree):
    """`sample_tree` with a trunk of ``trunk`` tokens, then ``branches`` branches of ``length``.

    The paper learns to choose the three per round; here they are fixed.
    """

    trunk: int = 2
    branches: int = 3
    length: int = 3
    branching: tuple[int, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        if self.trunk < 0 or self.branches < 1 or self.length < 1:
            raise ConfigError("delayed_tree takes trunk >= 0, branches >= 1 and length >= 1")
        self.branching = (1,) * self.trunk + (self.branches,) + (1,) * (self.length - 1)


def _noise(
    marginals: Marginals, seed: int, stream: int, context: SearchContext, node: int
) -> torch.Tensor:
    one = Marginals(marginals.log_q[:1], marginals.first + node + 1)
    return one.noise((seed, stream), 1, context.round)[0]


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return depths
