"""EoTP: the row ends where the text does."""

from dataclasses import dataclass

import numpy as np

from ..core.canvas import Canvas, FloatArray, IntArray
from ..core.capabilities import FIXED_LENGTH, FIXED_WINDOW, FORESIGHT
from ..core.limits import THRESHOLD, bounds
from .base import EosRule, View
from .compose import register
from .eos import is_stop, prefix_complete


@dataclass
class ProposedEnd:
    """The undecided position that proposes a stop id most surely in this step, if any does."""

    position: int | None = None


@register(
    "eotp",
    paper="Learning to Parallel: Accelerating Diffusion LLMs via Learnable Parallel Decoding",
    arxiv="2509.25188",
)
class EoTP(EosRule):
    """End the region at a stop id that is committed, else at the most likely one that is proposed.

    As soon as a stop id is committed, the leftmost new one is the end.  Where none is, the end is
    the undecided position that proposes one with the largest probability, if that reaches ``tau``
    (0.9): the official code has no such bound (0 here).  What lies left of the end is decoded as
    usual; given text is not cut off.
    """

    needs = frozenset({FIXED_WINDOW, FIXED_LENGTH})  # a window that slides has an end of its own
    offers = frozenset({FORESIGHT})
    limits = bounds(tau=THRESHOLD)

    tau: float = 0.9

    def rescore(self, view: View) -> FloatArray:
        canvas, p = view.canvas, view.all_predictions
        proposed = canvas.state(ProposedEnd)
        ends = is_stop(p.token, view.stop_ids) & (np.exp(p.logprob) >= self.tau)
        ends &= canvas.masked[p.positions] & (p.positions >= canvas.text_floor)
        at = ends.nonzero()[0]
        proposed.position = int(p.positions[at[p.logprob[at].argmax()]]) if at.size else None
        return view.score

    def check(self, canvas: Canvas, committed: IntArray, stop_ids: tuple[int, ...]) -> None:
        proposed = canvas.state(ProposedEnd)
        end, proposed.position = proposed.position, None
        ends = committed[is_stop(canvas.tokens[committed], stop_ids)]
        ends = ends[ends >= canvas.text_floor]
        end = int(ends.min()) if ends.size else end
        if end is not None and canvas.end == canvas.length and end + 1 < canvas.end:
            canvas.cut(end)
        prefix_complete(canvas, committed[committed < canvas.length], stop_ids)
