"""Fast-dLLM's factor rule: the more positions a step commits, the surer each has to be."""

import numpy as np

from ..core.canvas import BoolArray
from ..core.capabilities import PROBABILITY, REPEATABLE
from ..core.limits import POSITIVE, bounds
from .base import Selector, View, top
from .compose import register
from .threshold import FAST_DLLM


@register("factor", paper=FAST_DLLM, arxiv="2505.22618")
class Factor(Selector):
    """Commit the n best, n the largest with (n + 1)(1 - p_(n)) <= ``factor``; always the best one.

    ``factor`` > 0, default 1.
    """

    needs = frozenset({PROBABILITY})
    offers = frozenset({REPEATABLE})
    limits = bounds(factor=POSITIVE)

    factor: float = 1.0

    def select(self, view: View) -> BoolArray:
        ranked = np.sort(view.score)[::-1]
        rank = np.arange(1, len(ranked) + 1)
        passed = ranked >= 1 - self.factor / (rank + 1)
        passed[:1] = True
        n = len(passed) if passed.all() else int(passed.argmin())
        return top(view.score, n)
