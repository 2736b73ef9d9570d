"""LoPA: try several commit orders, keep the one with the most confident future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..canvas import BoolArray, Canvas
from ..capabilities import BRANCHES
from ..errors import ConfigError
from .base import Decide, Explorer, Part, Prediction, View
from .compose import register
from .threshold import Threshold


@register(
    "lopa",
    paper="LoPA: Scaling dLLM Inference via Lookahead Parallel Decoding",
    arxiv="2512.16229",
)
@dataclass(frozen=True)
class LoPA(Explorer):
    """Feed ``k`` continuations at once, keep the one whose remaining positions are surest.

    Beside the row after the step's commits, each of the ``k`` - 1 next most confident undecided
    positions of the window is committed alone in a branch of its own.  A branch scores ``alpha`` x
    the probability of that trial (1 for none) + (1 - ``alpha``) x the mean negative entropy of the
    ``branch_topp`` share of its undecided window positions that are least sure (1.0 = all).  ``k``
    2, ``alpha`` 0; ``base``: the sampler being explored (threshold 0.9).  A forward of k branches
    counts once in NFE and k times in computed positions.
    """

    needs = frozenset({BRANCHES})
    statistics = frozenset({"entropy"})

    base: tuple[Part, ...] = ()
    k: int = 2
    alpha: float = 0.0
    branch_topp: float = 1.0

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ConfigError(f"k must be at least 1, not {self.k}")
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha must lie in [0, 1], not {self.alpha}")
        if not 0 < self.branch_topp <= 1:
            raise ConfigError(f"branch_topp must lie in (0, 1], not {self.branch_topp}")

    @property
    def width(self) -> int:
        return self.k

    def companions(self) -> tuple[Part, ...]:
        return (Threshold(),)

    def trials(self, view: View, chosen: BoolArray) -> list[BoolArray]:
        order = np.argsort(-view.score, kind="stable")
        order = order[~chosen[order]][: self.k - 1]
        if not order.size:
            return []
        index = np.arange(len(chosen))
        return [np.zeros(len(chosen), np.bool_), *(index == i for i in order)]

    def choose(
        self, decide: Decide, branches: Sequence[Canvas], result: Sequence[Prediction]
    ) -> int:
        def score(i: int) -> float:
            own = branches[0].masked & ~branches[i].masked
            creation = float(np.exp(branches[i].logprob[own].sum()))
            return self.alpha * creation + (1 - self.alpha) * self._future(result[i])

        scores = [score(i) for i in range(len(branches))]
        # Ties go to a trial before the row as it stands, then to the first.
        return max(range(len(branches)), key=lambda i: (scores[i], i > 0, -i))

    def _future(self, prediction: Prediction) -> float:
        assert prediction.entropy is not None
        if not len(prediction.entropy):
            return 1.0
        count = max(1, int(np.ceil(self.branch_topp * len(prediction.entropy))))
        return float(np.mean(np.sort(-prediction.entropy)[:count]))
