"""SlowFast: explore the region, then exploit the part that is about to settle."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ..canvas import BoolArray, Canvas
from ..capabilities import MEMORYLESS, PROBABILITY
from ..errors import ConfigError
from .base import Part, Prediction, Selector, View, Window
from .compose import register
from .dcd import slide
from .threshold import check_probability

SLOWFAST = "Accelerating Diffusion Large Language Models with SlowFast Sampling"


@register("pairs", paper=SLOWFAST, arxiv="2506.10848")
@dataclass(frozen=True)
class Pairs(Selector):
    """Commit all that reaches ``tau`` (0.9) if there are two such positions, else the best one."""

    needs = frozenset({PROBABILITY})
    offers = frozenset({MEMORYLESS})

    tau: float = 0.9

    def __post_init__(self) -> None:
        check_probability("tau", self.tau)

    def select(self, view: View) -> BoolArray:
        sure: BoolArray = view.score >= self.tau
        return sure if sure.sum() >= 2 else np.zeros_like(sure)


@dataclass
class Exploration:
    """The estimates of the reach so far, one per exploring step."""

    reaches: list[int] = field(default_factory=list)


@register("slowfast", paper=SLOWFAST, arxiv="2506.10848")
@dataclass(frozen=True)
class SlowFast(Window):
    """Explore for some steps how far the model sees, then decide that part before going on.

    Exploring, the whole rest of the region is open for ``explore`` (6) steps; each estimates the
    reach, the last position with probability >= ``tau_reach`` (0.3).  Then the window is what lies
    before the last reach until it is decided.  ``early`` ends exploring when the last two
    reaches agree (standard deviation < 1), as the text of the paper suggests and its code does
    not.
    """

    statistics = frozenset({"max_logprob"})

    explore: int = 6
    tau_reach: float = 0.3
    early: bool = False

    def __post_init__(self) -> None:
        check_probability("tau_reach", self.tau_reach)
        if self.explore < 1:
            raise ConfigError(f"explore must be at least 1 step, not {self.explore}")

    def companions(self) -> tuple[Part, ...]:
        return (Pairs(),)

    def advance(self, canvas: Canvas) -> None:
        open_ = canvas.masked[canvas.start : canvas.end]
        if not open_.any():
            return
        first = canvas.start + int(open_.argmax())
        reaches = canvas.state(Exploration).reaches
        if self._explored(reaches) and canvas.masked[canvas.start : reaches[-1]].any():
            slide(canvas, first, reaches[-1])  # exploit
            return
        if self._explored(reaches):
            reaches.clear()
        slide(canvas, first, canvas.end)

    def _explored(self, reaches: list[int]) -> bool:
        agree = self.early and len(reaches) > 1 and np.std(reaches[-2:]) < 1
        return len(reaches) >= self.explore or bool(agree)

    def settle(self, canvas: Canvas, prediction: Prediction) -> None:
        reaches = canvas.state(Exploration).reaches
        if self._explored(reaches):
            return
        p = prediction.logprob if prediction.max_logprob is None else prediction.max_logprob
        far = prediction.positions[np.exp(p) >= self.tau_reach]
        reaches.append(int(far[-1]) + 1 if far.size else canvas.window[0] + 1)
