"""Fast-dLLM's parallel decoding: commit whatever is confident enough; and its factor rule: the more
positions a step commits, the surer each has to be."""

import numpy as np

from ..core.canvas import BoolArray
from ..core.capabilities import PROBABILITY, REPEATABLE
from ..core.limits import COUNT, POSITIVE, THRESHOLD, bounds
from .base import Selector, View, top
from .compose import register

FAST_DLLM = "Fast-dLLM: Training-free Acceleration of Diffusion LLM"


@register("threshold", paper=FAST_DLLM, arxiv="2505.22618")
class Threshold(Selector):
    """Commit every position whose probability reaches ``tau``, and always the ``n`` best ones.

    ``tau`` in [0, 1], default 0.9; 0 commits a block per step, ``inf`` ``n`` (1) tokens per step.
    """

    needs = frozenset({PROBABILITY})
    offers = frozenset({REPEATABLE})
    limits = bounds(tau=THRESHOLD, n=COUNT)

    tau: float = 0.9
    n: int = 1

    def select(self, view: View) -> BoolArray:
        sure: BoolArray = view.score >= self.tau
        return sure | top(view.score, self.n) if self.n > 1 else sure  # one is guaranteed anyway


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
        passed = ranked >= 1 - self.factor / np.arange(2, len(ranked) + 2)
        passed[:1] = True
        return top(view.score, len(passed) if passed.all() else int(passed.argmin()))
