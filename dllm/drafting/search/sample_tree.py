"""Trees of sampled chains."""

from __future__ import annotations

from dataclasses import dataclass

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
