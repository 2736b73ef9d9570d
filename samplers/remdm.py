"""ReMDM: towards the end of a block, write its least sure tokens again and again."""

from ..core.canvas import Canvas
from ..core.capabilities import CONSTRAINED, FIXED_WINDOW, KEEPS_TEXT
from ..core.limits import COUNT, SHARE, bounds
from .base import Part, top
from .compose import register
from .llada import LLaDA, Quota, scheduled
from .turn import Reviser, Turn

REMDM = "Remasking Discrete Diffusion Models with Inference-Time Scaling"


def _loop(canvas: Canvas, start: float, step: int) -> tuple[bool, int]:
    """Whether the block's step ``step`` lies in the loop, and the schedule's step it stands for."""
    steps = canvas.state(Quota).steps
    first = int(steps * start)
    return first <= step < first + steps, step if step < first else step - steps


@register("remdm_quota", paper=REMDM, arxiv="2503.00307")
class ReMDMQuota(LLaDA):
    """LLaDA's quota before and behind the loop of `ReMDM`, the ``n`` best positions in it."""

    offers = frozenset()
    limits = bounds(n=COUNT, start=SHARE)

    n: int = 1
    start: float = 0.875

    def quota(self, canvas: Canvas) -> int:
        inside, step = _loop(canvas, self.start, canvas.block_step)
        return self.n if inside else scheduled(canvas, step)


@register("remdm", paper=REMDM, arxiv="2503.00307")
class ReMDM(Reviser):
    """Loop late in a block: take back the least sure tokens, commit the best positions again.

    At ``start`` (7/8) the block's schedule pauses; each step of the loop takes back the ``n`` (1)
    tokens that were least sure when they were committed, and commits ``n`` positions.  The loop has
    as many steps as the block's schedule (``steps``, default one per position), so that every block
    takes twice its steps; then the schedule goes on.  What was committed counts with the
    probability it had then.  The method ends a text behind a block that holds its end:
    ``eos_policy="block_contains"``.
    """

    needs = frozenset({FIXED_WINDOW, KEEPS_TEXT})
    offers = frozenset({CONSTRAINED})
    limits = bounds(n=COUNT, start=SHARE)

    n: int = 1
    start: float = 0.875

    def companions(self, family: str) -> tuple[Part, ...]:
        return (ReMDMQuota(n=self.n, start=self.start),)

    def decide(self, turn: Turn) -> None:
        turn.commit()
        canvas, (low, high) = turn.canvas, turn.canvas.window
        inside, _ = _loop(canvas, self.start, canvas.block_step + 1)
        if not inside:
            return
        at = (~canvas.masked[low:high] & ~canvas.given[low:high]).nonzero()[0] + low
        turn.take_back(at[top(-canvas.logprob[at], min(self.n, len(at)))])
