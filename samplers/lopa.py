"""LoPA: try several commit orders, keep the one with the most confident future."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..core.canvas import BoolArray, Canvas
from ..core.capabilities import BRANCHES, SLIDING_BRANCHES
from ..core.limits import LANES, SHARE, SOME_SHARE, bounds, one_of
from .base import Part, Prediction, View
from .compose import register
from .scorers import SCORES
from .threshold import Threshold
from .turn import Explorer, Turn


@dataclass
class BranchScores:
    """How sure each branch was of its trial when it was made; 1 of the row as it stands."""

    scores: tuple[float, ...] = ()


@register(
    "lopa", paper="LoPA: Scaling dLLM Inference via Lookahead Parallel Decoding", arxiv="2512.16229"
)
class LoPA(Explorer):
    """Feed ``k`` continuations at once, keep the one that leaves the most confident rest.

    Beside the row after the step's commits, each of the ``k`` - 1 next most confident undecided
    positions of the window is committed alone in a branch of its own.  A branch scores ``alpha`` x
    the score of that trial (1 for none) + (1 - ``alpha``) x the mean ``confidence`` of the
    ``branch_topp`` share of its undecided window positions that are least sure (1.0 = all):
    "neg_entropy" as published, or "prob" or "margin".  ``k`` 2, ``alpha`` 0; ``base``: the sampler
    being explored (threshold 0.9), published with ``d2f``.  Without ``base_competes`` (the official
    code without branch verification) the row as it stands is not fed, and all ``k`` branches are
    trials.  A forward of k branches counts once in NFE and k times in computed positions.
    """

    needs = frozenset({BRANCHES, SLIDING_BRANCHES})
    limits = bounds(k=LANES, alpha=SHARE, branch_topp=SOME_SHARE, confidence=one_of(SCORES))

    base: tuple[Part, ...] = ()
    k: int = 2
    alpha: float = 0.0
    branch_topp: float = 1.0
    confidence: str = "neg_entropy"
    base_competes: bool = True

    @property
    def statistics(self) -> Mapping[str, int]:  # type: ignore[override]
        return SCORES[self.confidence].statistics

    @property
    def width(self) -> int:
        return self.k

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Threshold(),)

    def decide(self, turn: Turn) -> None:
        if turn.feed.branches:
            turn.keep(self._best(turn))
        turn.go_on()
        if turn.goes_on:
            turn.try_next(self._tried(turn.view, turn.chosen))

    def _tried(self, view: View, chosen: BoolArray) -> list[BoolArray]:
        order = np.argsort(-view.score, kind="stable")
        order = order[~chosen[order]][: self.k - self.base_competes]
        if not order.size:
            return []
        index, base = np.arange(len(chosen)), int(self.base_competes)
        scores = [1.0] * base + view.score[order].tolist()
        view.canvas.state(BranchScores).scores = tuple(scores)
        return [np.zeros(len(chosen), np.bool_)] * base + [index == i for i in order]

    def _open(self, turn: Turn) -> list[Prediction]:
        """What each branch says of what is left undecided in its window."""
        return [seen.prediction.of_window(seen.canvas) for seen in turn.seen]

    def _best(self, turn: Turn) -> int:
        branches, result = [seen.canvas for seen in turn.seen], self._open(turn)
        committed = turn.canvas.state(BranchScores).scores
        future = [self._future(*pair) for pair in zip(branches, result, strict=True)]
        scores = [
            self.alpha * c + (1 - self.alpha) * f for c, f in zip(committed, future, strict=True)
        ]
        # Ties go to a trial before the row as it stands, then to the first.
        return max(range(len(branches)), key=lambda i: (scores[i], i >= self.base_competes, -i))

    def _future(self, canvas: Canvas, prediction: Prediction) -> float:
        if not len(prediction.positions):
            return 1.0
        score = np.sort(SCORES[self.confidence].score(canvas, prediction))
        return float(np.mean(score[: max(1, int(self.branch_topp * len(score)))]))
