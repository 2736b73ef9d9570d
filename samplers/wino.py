"""WINO: draft widely, verify narrowly, take back what does not hold."""

from dataclasses import dataclass

import numpy as np

from ..core.canvas import BoolArray, Canvas
from ..core.capabilities import CONSTRAINED, FIXED_WINDOW, KEEPS_TEXT, PROBABILITY, REPEATED_MASKS
from ..core.limits import THRESHOLD, bounds
from .base import Part, Selector, View, top
from .compose import register
from .turn import Feed, Reviser, Turn
from .windows import StaticBlocks

WINO = "Wide-In, Narrow-Out: Revokable Decoding for Efficient and Effective DLLMs"
FIRST_BOUND = 30  # accepts assumed before the first step of a block


@register("wino_draft", paper=WINO, arxiv="2507.18578")
class WinoDraft(Selector):
    """Commit what exceeds ``tau1`` (0.6), at most 70 % of the undecided positions: 5 to 20."""

    needs = frozenset({PROBABILITY})
    limits = bounds(tau1=THRESHOLD)

    tau1: float = 0.6

    def select(self, view: View) -> BoolArray:
        most = min(max(int(0.7 * len(view.positions)), 5), 20)
        draft: BoolArray = view.score > self.tau1
        return draft if draft.sum() <= most else top(view.score, most)


@dataclass
class LastAccepts:
    """How many positions the last step of the block committed."""

    count: int = FIRST_BOUND


@register("wino", paper=WINO, arxiv="2507.18578")
class Wino(Reviser):
    """Predict each position once more without its own token; take back what is unlikely then.

    Each forward also feeds a [MASK] token per position of the block that sees all tokens but the
    one in its place (only directly: deeper layers of the others have seen it; that is part of the
    method).  Tokens committed in earlier steps whose probability there is below ``tau2`` (0.9)
    return to undecided, when the step committed more than one, and fewer than the step before
    committed: that bounds a block to as many steps as positions.  Drafts come from `WinoDraft`
    (``tau1`` 0.5 to 0.8 by task in the paper), blocks have 128 positions.
    """

    needs = frozenset({REPEATED_MASKS, FIXED_WINDOW, KEEPS_TEXT})
    offers = frozenset({CONSTRAINED})
    limits = bounds(tau2=THRESHOLD)

    tau2: float = 0.9

    def companions(self, family: str) -> tuple[Part, ...]:
        return (WinoDraft(), StaticBlocks(128))

    def begin_block(self, canvas: Canvas) -> None:
        canvas.state(LastAccepts).count = FIRST_BOUND

    def feeds(self, canvas: Canvas) -> Feed:
        return Feed(masks=np.arange(*canvas.window))

    def decide(self, turn: Turn) -> None:
        canvas, committed, doubts = turn.canvas, turn.commit(), turn.seen[0].masks
        last = canvas.state(LastAccepts)
        bound, last.count = last.count, len(committed)
        if len(committed) <= 1 or doubts is None:
            return
        at = doubts.positions
        old = ~canvas.masked[at] & ~canvas.given[at] & (canvas.commit_step[at] < canvas.step)
        at = at[old]
        verdict = np.exp(doubts.asked["stands"][old, 0])
        doubted = np.flatnonzero(verdict < self.tau2)
        if len(doubted) >= bound:
            worst = np.argsort(verdict[doubted], kind="stable")[: max(bound - 1, 0)]
            doubted = np.sort(doubted[worst])
        turn.take_back(at[doubted])
