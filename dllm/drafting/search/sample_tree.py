"""Trees of sampled chains."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...core.errors import ConfigError
from ..base import ROOT, Distribution, Draft
from .chains import Search, SearchContext, register
from .marginals import Marginals


@register("sample_tree")
@dataclass
class SampleTree(Search):
    """Draw children without replacement: ``branching`` of them per node, level by level."""

    distribution = Distribution.MARGINALS
    trees = True
    branching: tuple[int, ...] = (3, 2, 1, 1)

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise ConfigError("branching is a tuple of positive numbers, e.g. (3, 2, 1)")

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        level = [ROOT]
        for depth, width in enumerate(self.branching[:length]):
            below: list[int] = []
            for node in level:
                # sorting by perturbed log-probability draws without replacement, in order; every
                # node has noise of its own
                own = Marginals(marginals.log_q[:1], marginals.first + node + 1)
                noisy = marginals.log_q[depth] + own.noise(context.draft_key, 1, context.round)[0]
                width_here = min(width, int((noisy > -np.inf).sum()))
                for token in noisy.topk(width_here).indices.tolist():
                    below.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    depths.append(depth)
            level = below
        log_q = marginals.log_q[: len(self.branching)].cpu().numpy()
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
