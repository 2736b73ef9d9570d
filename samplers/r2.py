"""R2-dLLM's rules: commit what is redundant to compute again."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import numpy as np

from ..core.canvas import SELECTION, BoolArray, Canvas, Edit, FloatArray, IntArray
from ..core.capabilities import CONSTRAINED, FRESH_LOGITS, PROBABILITY
from ..core.limits import COUNT, NOT_NEGATIVE, THRESHOLD, bounds, one_of
from .base import NO_SCORES, NOTHING, Part, View
from .compose import register
from .threshold import Threshold
from .turn import Course, Turn

CLUSTER_MODES = ("confidence", "mid", "random")
EVALUATIONS = ("last", "ave", "max")


@dataclass
class Streak:
    """Per position: the likeliest id of its latest step, for how many steps in a row, and what is
    made of its probabilities meanwhile.  Belongs to one block."""

    token: IntArray = field(default_factory=lambda: NOTHING)
    count: IntArray = field(default_factory=lambda: NOTHING)
    value: FloatArray = field(default_factory=lambda: NO_SCORES)  # last, sum or maximum

    def clear(self, n: int) -> None:
        self.token, self.count = np.zeros((2, n), np.int64)
        self.value = np.zeros(n, np.float32)

    def moved(self, edit: Edit) -> None:
        self.token, self.count = edit.spliced(self.token, 0), edit.spliced(self.count, 0)
        self.value = edit.spliced(self.value, 0)

    def observe(
        self, at: IntArray, token: IntArray, p: FloatArray, how: str
    ) -> tuple[IntArray, FloatArray]:
        """Count one more step at ``at``; their counts and values."""
        same = self.token[at] == token
        count = self.count[at] * same + 1
        if how == "max":
            p = np.maximum(self.value[at] * same, p)
        elif how == "ave":
            p = self.value[at] * same + p
        self.token[at], self.count[at], self.value[at] = token, count, p
        return count, p


@register(
    "r2",
    paper="R2-dLLM: Accelerating Diffusion Large Language Models via Spatio-Temporal "
    "Redundancy Reduction",
    arxiv="2604.18995",
)
class R2(Course):
    """After a selector's commits add confident neighbourhoods, repeated tokens, stable predictions.

    Three rules inside the open block, each on what the ones before left undecided.  (1) In every
    window of ``confidence_cluster_size`` (3) positions with at most ``confidence_cluster_unmasked``
    (1) decided ones, commit all if the undecided have a mean probability of
    ``spatial_threshold`` (0.8).  (2) Of a run of equal likeliest tokens whose best exceeds
    ``spatial_threshold`` commit one: the best, the middle or a random one (``token_cluster``).
    (3) Commit a token that was likeliest in ``temporal_steps`` (3) consecutive steps, if its last,
    average or maximal probability (``temporal_eval``) reaches ``temporal_threshold`` (0.8).  None
    for a mode or number of steps switches its rule off, for ``confidence_cluster_size`` rules (1)
    and (2), as in the official code; None for ``confidence_cluster_unmasked`` lifts that limit.
    At temperature > 0 rule (1) averages the probabilities of what is proposed and commits that;
    the others look at the likeliest tokens.  Without another selector the first commits are those
    of ``threshold``; the published speed needs fine-tuned checkpoints.
    """

    needs = frozenset({PROBABILITY, FRESH_LOGITS})
    statistics: ClassVar = {"max_logprob": 1, "top_token": 1}
    offers = frozenset({CONSTRAINED})
    limits = bounds(
        spatial_threshold=THRESHOLD, temporal_threshold=THRESHOLD,
        token_cluster=one_of(CLUSTER_MODES), temporal_eval=one_of(EVALUATIONS),
        confidence_cluster_size=COUNT, confidence_cluster_unmasked=NOT_NEGATIVE,
        temporal_steps=COUNT,
    )  # fmt: skip

    confidence_cluster_size: int | None = 3
    spatial_threshold: float = 0.8
    confidence_cluster_unmasked: int | None = 1
    token_cluster: str | None = "confidence"
    temporal_steps: int | None = 3
    temporal_threshold: float = 0.8
    temporal_eval: str = "last"

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Threshold(),)

    def begin_block(self, canvas: Canvas) -> None:
        canvas.state(Streak).clear(len(canvas.tokens))

    def decide(self, turn: Turn) -> None:
        chosen = turn.choose()
        left = (~chosen).nonzero()[0]
        if turn.stopped() or not left.size:
            return
        rest = turn.view.take(left)
        near, more = self._redundant(rest)
        tokens, logprobs = turn.tokens, turn.logprobs
        p = rest.prediction
        if not (p.joint or p.top_token is None or p.max_logprob is None):
            # Neighbourhoods are committed as proposed, runs and streaks as the clean argmax.
            clean = (more & ~near).nonzero()[0]
            likeliest = p.top_token[clean, 0]
            if np.count_nonzero(p.token[clean] != likeliest):
                tokens, logprobs = tokens.copy(), logprobs.copy()
                tokens[left[clean]], logprobs[left[clean]] = likeliest, p.max_logprob[clean]
        chosen = chosen.copy()
        chosen[left] = more
        turn.choose_these(chosen, tokens, logprobs)

    def _redundant(self, view: View) -> tuple[BoolArray, BoolArray]:
        """(n,) bool twice: what is chosen as a neighbourhood, and all that is chosen."""
        prediction = view.prediction
        likeliest, clean = prediction.top_token, prediction.max_logprob
        if prediction.joint:
            likeliest = clean = None
        token = prediction.token if likeliest is None else likeliest[:, 0]
        p = np.exp(prediction.logprob if clean is None else clean)
        near = self._clusters(view)
        chosen = near.copy()
        if self.confidence_cluster_size is not None and self.token_cluster is not None:
            chosen[self._runs(view, token, p, (~near).nonzero()[0])] = True
        if self.temporal_steps is not None:
            chosen |= self._stable(view, token, p)  # what is chosen already has no use for its own
        return near, chosen

    def _clusters(self, view: View) -> BoolArray:
        """(n,) bool."""
        p = np.exp(view.prediction.logprob)
        low, high = view.canvas.window
        size = self.confidence_cluster_size
        if size is None or size > high - low:
            return np.zeros(len(p), np.bool_)
        at, ones = view.positions - low, np.ones(size)
        open_, sure = np.zeros((2, high - low))
        open_[at], sure[at] = 1, p
        # Per window of neighbours: how many are undecided, and the sum of their probabilities.
        count, sums = np.correlate(open_, ones), np.correlate(sure, ones)
        least = 1
        if self.confidence_cluster_unmasked is not None:
            least = max(least, size - self.confidence_cluster_unmasked)
        good = (count >= least) & (sums >= self.spatial_threshold * np.maximum(count, 1))
        covered = np.correlate(good, ones, "full")  # good windows that a position lies in
        return covered[at] > 0

    def _runs(self, view: View, token: IntArray, p: FloatArray, left: IntArray) -> IntArray:
        """Which of ``left`` to commit, as indices into the view."""
        at, ids = view.positions[left], token[left]
        repeats = (ids[1:] == ids[:-1]) & (at[1:] - at[:-1] == 1)
        if not np.count_nonzero(repeats):
            return NOTHING
        edges = np.flatnonzero(np.concatenate([[True], ~repeats, [True]]))
        runs = [left[low:high] for low, high in pairwise(edges.tolist()) if high - low > 1]
        sure = [run for run in runs if p[run].max() > self.spatial_threshold]
        return np.array([run[self._pick(view, run, p)] for run in sure], np.int64)

    def _pick(self, view: View, run: IntArray, p: FloatArray) -> int:
        if self.token_cluster == "mid":
            return len(run) // 2
        if self.token_cluster == "random":
            return int(view.canvas.uniform(SELECTION, view.positions[run]).argmax())
        return int(p[run].argmax())

    def _stable(self, view: View, token: IntArray, p: FloatArray) -> BoolArray:
        """(n,) bool."""
        streak = view.canvas.state(Streak)
        count, value = streak.observe(view.positions, token, p, self.temporal_eval)
        if self.temporal_eval == "ave":
            value = (value / count).astype(np.float32)
        return (count >= (self.temporal_steps or 1)) & (value >= self.temporal_threshold)
