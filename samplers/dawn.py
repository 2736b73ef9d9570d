"""DAWN: what may be decided together, read off the attention between positions."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ..core.canvas import BoolArray, Canvas, FloatArray, IntArray
from ..core.capabilities import OWN_PREDICTIONS, PROBABILITY, WHOLE_TEXT
from ..core.limits import COUNT, THRESHOLD, bounds
from ..core.spec import FamilyDefaults
from .base import Reads, Selector, View
from .compose import register


@register(
    "dawn", paper="DAWN: Dependency-Aware Fast Inference for Diffusion LLMs", arxiv="2602.06953"
)
class DAWN(Selector):
    """Commit what is sure, what leans on sure tokens, and what does not lean on one another.

    Position i leans on j where its attention to j, mean over the heads of the last ``layers`` (4)
    decoder layers, reaches ``tau_edge``; positions that attract more than ``tau_sink`` on average
    are sinks and count for nothing.  Three kinds are committed: probability at least ``tau`` (0.9);
    at least ``tau_induce`` and leaning on a decided token, prompt included, that the model still
    gives ``tau``; and, of the rest with at least ``tau_low``, the best first, each that neither
    leans on one already taken nor is leaned on by it.  Thresholds left open are those of the
    released runs by family, for Dream of the instruct model.
    """

    needs = frozenset({PROBABILITY, WHOLE_TEXT, OWN_PREDICTIONS})

    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"tau_sink": 0.01, "tau_edge": 0.07, "tau_induce": 0.7, "tau_low": 0.75},
        "dream": {"tau_sink": 0.03, "tau_edge": 0.10, "tau_induce": 0.75, "tau_low": 0.8},
    }
    limits = bounds(
        tau=THRESHOLD, tau_sink=THRESHOLD, tau_edge=THRESHOLD, tau_induce=THRESHOLD,
        tau_low=THRESHOLD, layers=COUNT
    )  # fmt: skip

    tau: float = 0.9
    tau_sink: float | None = None
    tau_edge: float | None = None
    tau_induce: float | None = None
    tau_low: float | None = None
    layers: int = 4

    @property
    def statistics(self) -> Mapping[str, int]:  # type: ignore[override]
        return {"attention": self.layers}

    def reads(self, canvas: Canvas) -> Reads:
        return Reads(np.flatnonzero(~canvas.masked[: canvas.window[1]]))

    def select(self, view: View) -> BoolArray:
        assert self.tau_induce is not None and self.tau_low is not None, "compose sets open fields"
        at, score = view.positions, view.score
        edge = self.edges(view)
        sure = score >= self.tau
        induced = (score >= self.tau_induce) & edge[np.ix_(at, self._anchors(view))].any(1)
        near = edge[np.ix_(at, at[sure & induced])].any(1)
        rest = ((score >= self.tau_low) & ~sure & ~induced & ~near).nonzero()[0]
        leans = edge[np.ix_(at[rest], at[rest])]
        chosen = sure | induced
        chosen[rest[independent(leans | leans.T, score[rest])]] = True
        return chosen

    def edges(self, view: View) -> BoolArray:
        """(L, L) bool: whether the row's position leans on the column's."""
        attention = view.all_predictions.attention
        assert attention is not None, "the engine provides the maps"
        assert self.tau_edge is not None and self.tau_sink is not None, "compose sets open fields"
        edge: BoolArray = attention >= self.tau_edge
        edge[:, attention.mean(0) > self.tau_sink] = False
        np.fill_diagonal(edge, False)
        return edge

    def _anchors(self, view: View) -> IntArray:
        """Decided positions whose present prediction is sure."""
        p = view.all_predictions
        decided = ~view.canvas.masked[p.positions] & (p.positions < view.canvas.window[1])
        return p.positions[decided & (np.exp(p.logprob) >= self.tau)]


def independent(conflict: BoolArray, score: FloatArray) -> IntArray:
    """Indices, best ``score`` first, of which no two ``conflict`` (n, n)."""
    free = np.ones(len(score), np.bool_)
    taken = []
    for i in np.argsort(-score, kind="stable"):
        if free[i]:
            taken.append(i)
            free &= ~conflict[i]
    return np.array(taken, np.int64)
