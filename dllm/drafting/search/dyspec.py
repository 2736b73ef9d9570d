"""DySpec: a tree that grows where the drafter is sure."""

from __future__ import annotations

from dataclasses import dataclass

from .best_first_tree import BestFirstTree
from .chains import register


@register("dyspec", paper="DySpec: Faster Speculative Decoding with Dynamic Token Tree Structure",
          arxiv="2410.11744")  # fmt: skip
@dataclass
class DySpec(BestFirstTree):
    """`best_first_tree` of 64 nodes: DySpec's greedy expansion by estimated value.

    Its value of a node is the drafter's probability of the path; with marginals that does not
    depend on the path, so that its tree and DDTree's are the same.
    """

    nodes: int = 64
