"""LLaDA2.1's editing: replace decided tokens that the model no longer believes."""

from dataclasses import dataclass

import numpy as np

from ..core.canvas import Canvas
from ..core.capabilities import ALL_LOGITS, FINAL, FIXED_WINDOW, KEEPS_TEXT, OWN_PREDICTIONS
from ..core.limits import THRESHOLD, bounds, limit
from .base import Part, Reads
from .compose import register
from .threshold import Threshold
from .turn import Reviser, Turn


@dataclass
class Edits:
    """Forwards that found the block decided."""

    post: int = 0


@register(
    "edit", paper="LLaDA2.1: Speeding Up Text Diffusion via Token Editing", arxiv="2602.08676"
)
class Edit(Reviser):
    """Replace decided tokens of the block that the model would choose otherwise now.

    It looks at what earlier forwards decided, in every step and ``post_steps`` (16) more times when
    the block is decided, until nothing changes.  A token is replaced by the model's present choice
    where that is another one with probability above ``tau`` (0.5 as in the card's quality mode;
    its speed mode is ``threshold(tau=0.5)+edit(tau=0)``).

    New tokens come from ``threshold(tau=0.7)`` unless another selector is given;
    ``threshold(tau=0.7, n=2)`` commits at least two.
    """

    needs = frozenset({ALL_LOGITS, FIXED_WINDOW, KEEPS_TEXT, OWN_PREDICTIONS})
    offers = frozenset({FINAL})
    limits = bounds(tau=THRESHOLD, post_steps=limit(
        lambda n: 0 <= n <= 1000, "{name} must lie between 0 and 1000 forwards, not {value}"
    ))  # fmt: skip

    tau: float = 0.5
    post_steps: int = 16

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Threshold(tau=0.7),)

    def begin_block(self, canvas: Canvas) -> None:
        canvas.states[Edits] = Edits()

    def reads(self, canvas: Canvas) -> Reads:
        low, high = canvas.window
        return Reads((~canvas.masked[low:high] & ~canvas.given[low:high]).nonzero()[0] + low)

    def decide(self, turn: Turn) -> None:
        turn.commit()
        view = turn.view
        if turn.stopped():
            return
        canvas, p = view.canvas, view.all_predictions
        low, high = canvas.window
        mine = (p.positions >= low) & (p.positions < high) & ~canvas.given[p.positions]
        earlier = canvas.commit_step[p.positions] < canvas.step
        old = p.take(mine & ~canvas.masked[p.positions] & earlier)
        another = old.token != canvas.tokens[old.positions]
        new = old.take(another & (np.exp(old.logprob) > self.tau))
        turn.rewrite(new.positions, new.token, new.logprob)
        edits = canvas.state(Edits)
        if not canvas.masks().size and (len(view.positions) or len(new.positions)):
            edits.post += 1  # a block that was decided now, or changed, deserves another forward
            turn.open = edits.post <= self.post_steps
