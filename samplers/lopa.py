"""LoPA: try several commit orders, keep the one with the most confident future."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..core.canvas import BoolArray, Canvas, Fed
from ..core.capabilities import BRANCHES, SLIDING_BRANCHES
from ..core.limits import COUNT, SHARE, SOME_SHARE, bounds, one_of
from .base import Part, Prediction, Transform, View
from .compose import register
from .scorers import SCORES
from .threshold import Threshold
from .turn import Explorer, Turn


@dataclass
class BranchScores:
    """How sure each branch was of its trial when it was made; 1 of the row as it stands."""

    scores: tuple[float, ...] = ()


@dataclass
class KeptLogits:
    """What was said of ``position``, the first open one, when the blocks before it were kept."""

    position: int = -1
    prediction: Prediction | None = None

    def put(self, prediction: Prediction) -> Prediction:
        """``prediction`` with what was kept."""
        here = np.flatnonzero(prediction.positions == self.position)
        if self.prediction is None or not here.size:
            return prediction
        changed = {}
        for name in ("token", "logprob", "entropy", "margin"):
            array, kept = getattr(prediction, name), getattr(self.prediction, name)
            if array is not None:
                changed[name] = array.copy()
                changed[name][here] = kept
        return replace(prediction, **changed)


class KeepsLogits(Transform):
    """Predicts the first open position as when the blocks before it were kept (cache ``d2f``)."""

    name = "keeps_logits"

    def apply(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        kept, low = canvas.state(KeptLogits), canvas.state(Fed).first
        if kept.position != low:
            here = np.flatnonzero(prediction.positions == low)
            kept.position = low
            kept.prediction = prediction.take(here) if here.size else None
        return kept.put(prediction)


@register(
    "lopa", paper="LoPA: Scaling dLLM Inference via Lookahead Parallel Decoding", arxiv="2512.16229"
)
class LoPA(Explorer):
    """Feed ``k`` continuations at once, keep the one whose remaining positions are surest.

    Beside the row after the step's commits, each of the ``k`` - 1 next most confident undecided
    positions of the window is committed alone in a branch of its own.  A branch scores ``alpha`` x
    the score of that trial (1 for none) + (1 - ``alpha``) x the mean ``confidence`` of the
    ``branch_topp`` share of its undecided window positions that are least sure (1.0 = all):
    "neg_entropy" as published, or "prob" or "margin".  ``k`` 2, ``alpha`` 0; ``base``: the sampler
    being explored (threshold 0.9), published with ``d2f``.  The official ``branching_factor`` does
    not count the row as it stands: it is k - 1.  Without ``base_competes`` (the official code
    without branch verification) the row as it stands is not fed, and all ``k`` branches are trials.
    A forward of k branches counts once in NFE and k times in computed positions.

    ``official`` reproduces the released code where blocks see one another, with
    ``cache="d2f(causal=False, official=True)"``: the row left of the open blocks is not computed
    again, what it predicts stays as it was.
    """

    needs = frozenset({BRANCHES, SLIDING_BRANCHES})
    limits = bounds(k=COUNT, alpha=SHARE, branch_topp=SOME_SHARE, confidence=one_of(SCORES))

    base: tuple[Part, ...] = ()
    k: int = 2
    alpha: float = 0.0
    branch_topp: float = 1.0
    confidence: str = "neg_entropy"
    base_competes: bool = True
    official: bool = False

    @property
    def statistics(self) -> Mapping[str, int]:  # type: ignore[override]
        return SCORES[self.confidence].statistics

    @property
    def width(self) -> int:
        return self.k

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Threshold(), KeepsLogits()) if self.official else (Threshold(),)

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

    def _best(self, turn: Turn) -> int:
        branches = [seen.canvas for seen in turn.seen]
        result = [seen.prediction.of_window(seen.canvas) for seen in turn.seen]
        committed = turn.canvas.state(BranchScores).scores
        if self.official:
            result = [
                p.put(r) if (p := b.state(KeptLogits)).position == b.state(Fed).first else r
                for b, r in zip(branches, result, strict=True)
            ]
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
