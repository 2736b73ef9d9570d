"""SlowFast: explore the region, then exploit the part that is about to settle."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ..core.canvas import BoolArray, Canvas, Cycle
from ..core.capabilities import FIXED_LENGTH, PROBABILITY, REPEATABLE
from ..core.limits import COUNT, POSITIVE, THRESHOLD, bounds, one_of
from ..core.spec import FamilyDefaults
from .base import Part, Prediction, Selector, View, Window
from .compose import register
from .dcd import slide

SLOWFAST = "Accelerating Diffusion Large Language Models with SlowFast Sampling"
SPREADS = ("std", "variance")


@register("pairs", paper=SLOWFAST, arxiv="2506.10848")
class Pairs(Selector):
    """Commit all that reaches ``tau`` (0.9) if there are ``least`` (2) such positions, else the
    best one.

    ``tau_explore`` and ``least_explore``: the same while `SlowFast` explores (Dream 0.8; else as
    ``tau`` and ``least``).
    """

    needs = frozenset({PROBABILITY})
    offers = frozenset({REPEATABLE})
    family_defaults: ClassVar[FamilyDefaults] = {"dream": {"tau_explore": 0.8}}
    limits = bounds(tau=THRESHOLD, tau_explore=THRESHOLD, least=COUNT, least_explore=COUNT)

    tau: float = 0.9
    least: int = 2
    tau_explore: float | None = None
    least_explore: int | None = None

    def select(self, view: View) -> BoolArray:
        cycle = view.canvas.state(Cycle)
        tau, least = self.tau, self.least
        if cycle.start >= 0 and cycle.exploring:
            tau = tau if self.tau_explore is None else self.tau_explore
            least = self.least_explore or least
        sure: BoolArray = view.score >= tau
        return sure if sure.sum() >= least else np.zeros_like(sure)


@register("slowfast", paper=SLOWFAST, arxiv="2506.10848")
class SlowFast(Window):
    """Explore for some steps how far the model sees, then decide that part before going on.

    Exploring, the whole rest of the block is open for ``explore`` (6) steps; each estimates where
    the cycle ends, behind the last position with probability >= ``tau_reach`` (LLaDA 0.3, Dream
    0.1).  The first estimate that agrees with those before it holds: the last ``estimates`` (2)
    have a standard deviation below ``stable`` (1.0), on Dream an unbiased variance of at most that
    (``spread``); if none does, their mean.  Then the window is what lies before that end until it
    is decided.  ``block_length``: no cycle reaches beyond its block (default: the region is one).
    ``early`` ends exploring when the end is known, as the text of the paper suggests and its code
    does not.
    """

    needs = frozenset({FIXED_LENGTH})
    statistics = {"max_logprob": 1}
    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"tau_reach": 0.3, "spread": "std"},
        "dream": {"tau_reach": 0.1, "spread": "variance"},
    }
    limits = bounds(
        tau_reach=THRESHOLD, explore=COUNT, estimates=COUNT, block_length=COUNT, stable=POSITIVE,
        spread=one_of(SPREADS)
    )  # fmt: skip

    explore: int = 6
    tau_reach: float | None = None
    early: bool = False
    estimates: int = 2
    stable: float = 1.0
    spread: str | None = None
    block_length: int | None = None

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Pairs(),)

    def advance(self, canvas: Canvas) -> None:
        cycle, open_ = canvas.state(Cycle), canvas.masked[canvas.start : canvas.end]
        first = canvas.start + int(open_.argmax())
        if first >= cycle.block_end:
            low = self._block(canvas, first)
            cycle.begin(low, min(low + (self.block_length or canvas.end), canvas.end))
        explored = len(cycle.estimates) >= self.explore or (self.early and cycle.stable)
        if cycle.exploring and explored:
            cycle.exploring = False
        if not cycle.exploring and first >= cycle.end:
            cycle.begin(max(cycle.end, cycle.start), cycle.block_end)
        slide(canvas, first, min(cycle.block_end if cycle.exploring else cycle.end, canvas.end))

    def _block(self, canvas: Canvas, position: int) -> int:
        """Where the block of a position starts."""
        size = self.block_length or canvas.end
        return canvas.start + (position - canvas.start) // size * size

    def settle(self, canvas: Canvas, prediction: Prediction) -> None:
        cycle, tau = canvas.state(Cycle), self.tau_reach
        assert tau is not None
        if not cycle.exploring:
            return
        p = prediction.logprob if prediction.max_logprob is None else prediction.max_logprob
        here = prediction.positions < cycle.block_end
        far = prediction.positions[here & (np.exp(p) >= tau)]
        reach = int(far[-1]) + 1 if far.size else cycle.start + 1
        cycle.estimates.append(reach)
        if not cycle.stable:
            cycle.stable, cycle.end = self._agree(cycle, self._block(canvas, cycle.start))

    def _agree(self, cycle: Cycle, origin: int) -> tuple[bool, int]:
        """Whether the last estimates agree, and the end that follows from them."""
        recent = cycle.estimates[-self.estimates :]
        missing = self.estimates - len(recent)
        if self.spread == "variance":  # lengths; those still missing count as 0
            lengths = np.array([reach - origin for reach in recent] + [0] * missing, np.float32)
            spread = float(lengths.var(ddof=1)) if len(lengths) > 1 else 0.0
            stable, mean = spread <= self.stable, max(round(float(lengths.mean())), 1)
        else:
            lengths = np.array(recent) - origin
            stable, mean = not missing and lengths.std() < self.stable, int(lengths.mean())
        return bool(stable), recent[-1] if stable else origin + mean
