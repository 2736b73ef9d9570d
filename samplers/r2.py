"""R2-dLLM's rules: commit what is redundant to compute again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..canvas import SELECTION, BoolArray, Canvas, FloatArray, IntArray
from ..capabilities import PROBABILITY
from ..errors import ConfigError, UnknownNameError
from .base import Selector, View
from .compose import register
from .threshold import check_probability

CLUSTER_MODES = ("confidence", "mid", "random")
EVALUATIONS = ("last", "ave", "max")


@dataclass
class Streak:
    """Per position: the likeliest id of its latest step, for how many steps in a row, and what is
    made of its probabilities meanwhile.  Belongs to one block."""

    block: int
    token: IntArray
    count: IntArray
    value: FloatArray  # last, sum or maximum

    @classmethod
    def fresh(cls, canvas: Canvas) -> Streak:
        n = len(canvas.tokens)
        return cls(canvas.block, np.full(n, -1), np.zeros(n, np.int64), np.zeros(n, np.float32))

    def observe(self, at: IntArray, token: IntArray, p: FloatArray, how: str) -> None:
        same = self.token[at] == token
        self.token[at] = token
        self.count[at] = self.count[at] * same + 1
        if how == "max":
            p = np.maximum(self.value[at] * same, p)
        elif how == "ave":
            p = self.value[at] * same + p
        self.value[at] = p


@register(
    "r2",
    paper="R2-dLLM: Accelerating Diffusion Large Language Models via Spatio-Temporal "
    "Redundancy Reduction",
    arxiv="2604.18995",
)
@dataclass(frozen=True)
class R2(Selector):
    """After a selector's commits add confident neighbourhoods, repeated tokens, stable predictions.

    Three rules inside the open block, each on what the ones before left undecided.  (1) In every
    window of ``confidence_cluster_size`` (3) positions with at most ``confidence_cluster_unmasked``
    (1) decided ones, commit all if the undecided have a mean probability of
    ``spatial_threshold`` (0.8).  (2) Of a run of equal likeliest tokens whose best exceeds
    ``spatial_threshold`` commit one: the surest, the middle or a random one (``token_cluster``).
    (3) Commit a token that was likeliest in ``temporal_steps`` (3) consecutive steps, if its last,
    average or maximal probability (``temporal_eval``) reaches ``temporal_threshold`` (0.8).  None
    for a size, mode or number of steps switches its rule off, None for
    ``confidence_cluster_unmasked`` lifts that limit.  Without another selector the
    first commits are those of ``threshold``; the published speed needs fine-tuned checkpoints.
    """

    needs = frozenset({PROBABILITY})
    statistics = frozenset({"max_logprob", "top_token"})
    extends = True

    confidence_cluster_size: int | None = 3
    spatial_threshold: float = 0.8
    confidence_cluster_unmasked: int | None = 1
    token_cluster: str | None = "confidence"
    temporal_steps: int | None = 3
    temporal_threshold: float = 0.8
    temporal_eval: str = "last"

    def __post_init__(self) -> None:
        check_probability("spatial_threshold", self.spatial_threshold)
        check_probability("temporal_threshold", self.temporal_threshold)
        if self.token_cluster is not None and self.token_cluster not in CLUSTER_MODES:
            raise UnknownNameError("token_cluster", self.token_cluster, CLUSTER_MODES)
        if self.temporal_eval not in EVALUATIONS:
            raise UnknownNameError("temporal_eval", self.temporal_eval, EVALUATIONS)
        for name in ("confidence_cluster_size", "temporal_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")

    def _likeliest(self, view: View) -> tuple[IntArray, FloatArray]:
        """Clean argmax and its probability."""
        p = view.prediction
        token = p.token if p.top_token is None else p.top_token[:, 0]
        logprob = p.logprob if p.max_logprob is None else p.max_logprob
        return token, np.exp(logprob)

    def tokens(self, view: View) -> IntArray:
        return self._likeliest(view)[0]

    def select(self, view: View) -> BoolArray:
        token, p = self._likeliest(view)
        chosen = np.zeros(len(token), np.bool_)
        if self.confidence_cluster_size is not None:
            chosen |= self._clusters(view, p)
        if self.token_cluster is not None:
            chosen |= self._runs(view, token, p, ~chosen)
        if self.temporal_steps is not None:
            chosen |= self._stable(view, token, p, ~chosen)
        return chosen

    def _clusters(self, view: View, p: FloatArray) -> BoolArray:
        low, high = view.canvas.window
        size = self.confidence_cluster_size or 1
        nowhere = np.zeros(len(p), np.bool_)
        if size > high - low or p.max(initial=0.0) < self.spatial_threshold:
            return nowhere  # no mean can reach the threshold
        at = view.positions - low
        open_, sure = np.zeros((2, high - low))
        open_[at], sure[at] = 1, p
        count, sums = _windowed(open_, size), _windowed(sure, size)
        good = (count > 0) & (sums >= self.spatial_threshold * count)
        if self.confidence_cluster_unmasked is not None:
            good &= count >= size - self.confidence_cluster_unmasked
        if not good.any():
            return nowhere
        marked = np.zeros(high - low, np.bool_)  # every position of a good window
        for offset in range(size):
            marked[offset : offset + len(good)] |= good
        found: BoolArray = marked[at]
        return found

    def _runs(self, view: View, token: IntArray, p: FloatArray, left: BoolArray) -> BoolArray:
        where = np.flatnonzero(left)
        at, ids = view.positions[where], token[where]
        chosen = np.zeros(len(token), np.bool_)
        if not ((ids[1:] == ids[:-1]) & (at[1:] - at[:-1] == 1)).any():
            return chosen
        starts = np.flatnonzero((np.diff(at, prepend=-2) > 1) | (np.diff(ids, prepend=-1) != 0))
        for low, high in zip(starts, np.append(starts[1:], len(where)), strict=True):
            run = where[low:high]
            if len(run) > 1 and p[run].max() > self.spatial_threshold:
                chosen[run[self._pick(view, run, p)]] = True
        return chosen

    def _pick(self, view: View, run: IntArray, p: FloatArray) -> int:
        if self.token_cluster == "mid":
            return len(run) // 2
        if self.token_cluster == "random":
            return int(view.canvas.uniform(SELECTION, view.positions[run]).argmax())
        return int(p[run].argmax())

    def _stable(self, view: View, token: IntArray, p: FloatArray, left: BoolArray) -> BoolArray:
        canvas = view.canvas
        streak: Streak | None = canvas.memory.get("r2")
        if streak is None or streak.block != canvas.block:
            streak = canvas.memory["r2"] = Streak.fresh(canvas)
        at = view.positions[left]
        streak.observe(at, token[left], p[left], self.temporal_eval)
        count, value = streak.count[at], streak.value[at]
        if self.temporal_eval == "ave":
            value = (value / count).astype(np.float32)
        stable = left.copy()
        stable[left] = (count >= (self.temporal_steps or 1)) & (value >= self.temporal_threshold)
        return stable


def _windowed(values: npt.NDArray[np.float64], size: int) -> npt.NDArray[np.float64]:
    """Sums over all windows of ``size`` neighbours."""
    total = np.zeros(len(values) + 1)
    values.cumsum(out=total[1:])
    return total[size:] - total[: len(total) - size]
