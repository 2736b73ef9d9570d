"""The LLaDA baseline: a fixed number of commits per step, most confident first."""

from dataclasses import dataclass

from ..core.canvas import BoolArray, Canvas
from ..core.capabilities import FIXED_WINDOW, FORESIGHT
from ..core.errors import ConfigError
from ..core.limits import COUNT, bounds, one_of
from .base import Part, Selector, View, even_share, top
from .compose import register
from .scorers import Probability, Random


def block_steps(canvas: Canvas, steps: int | None) -> int:
    """Steps that fall to the window that has just been opened.

    ``steps`` is the budget of the region, shared out by length, whatever is given in it; None
    means one undecided position per step.
    """
    low, high = canvas.window
    if steps is None:
        return int(canvas.masked[low:high].sum())
    start, end = canvas.region
    low = max(low, start)
    share = steps * (high - start) // (end - start) - steps * (low - start) // (end - start)
    if share < 1 and canvas.end == end:
        raise ConfigError(
            f"steps={steps} gives a block of {high - low} positions no step; "
            f"use at least one step per block or a larger block_length"
        )
    return max(share, 1)  # a region that was cut may end in a shorter block


@dataclass
class Quota:
    """The schedule of the current window: positions to commit, in how many steps."""

    items: int = 0
    steps: int = 0


def schedule(canvas: Canvas, steps: int | None, kind: type[Quota] = Quota) -> None:
    """Share the positions of the window that has just been opened out over its steps."""
    quota = canvas.state(kind)
    quota.items, quota.steps = len(canvas.masks()), block_steps(canvas, steps)


def scheduled(canvas: Canvas, step: int) -> int:
    """Positions that fall to a step of the schedule; all that are left when it has run out."""
    quota = canvas.state(Quota)
    return even_share(quota.items, quota.steps, step) if step < quota.steps else len(canvas.masks())


@register("llada", paper="Large Language Diffusion Models", arxiv="2502.09992")
class LLaDA(Selector):
    """Commit a fixed quota of the most confident positions per step.

    ``steps``: total number of steps for the region, shared out over the blocks by their length,
    also where a part of them is given (default: one position per step).  ``remasking``:
    "low_confidence" (score = probability of the proposal) or "random".  Where steps exceed
    positions, the surplus steps need no forward.
    """

    needs = frozenset({FIXED_WINDOW})
    offers = frozenset({FORESIGHT})  # what it looks at is the score
    scheduled = True
    limits = bounds(steps=COUNT, remasking=one_of(("low_confidence", "random")))

    steps: int | None = None
    remasking: str = "low_confidence"

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Random() if self.remasking == "random" else Probability(),)

    def begin_block(self, canvas: Canvas) -> None:
        schedule(canvas, self.steps)

    def quota(self, canvas: Canvas) -> int:
        """Positions to commit in this step."""
        return scheduled(canvas, canvas.block_step)

    def rests(self, canvas: Canvas) -> bool:
        return self.quota(canvas) == 0

    def select(self, view: View) -> BoolArray:
        return top(view.score, self.quota(view.canvas))
