"""FreeDave: draft the next steps, verify them all in one forward, change nothing."""

from typing import ClassVar

import numpy as np

from ..core.canvas import Canvas
from ..core.capabilities import (
    BRANCHES,
    CONSTRAINED,
    FINAL,
    GREEDY,
    KEEPS_TEXT,
    REPEATABLE,
    SLIDING_BRANCHES,
)
from ..core.limits import LANES, bounds
from ..core.spec import FamilyDefaults
from .base import Part
from .compose import register
from .fixed import Fixed
from .turn import Explorer, Turn


@register(
    "freedave",
    paper="Free Draft-and-Verification: Toward Lossless Parallel Decoding for Diffusion LLMs",
    arxiv="2510.00294",
)
class FreeDave(Explorer):
    """Guess the next commits of a sampler from the present scores, and keep those it confirms.

    After the step's own commits, up to ``draft_depth`` - 1 (LLaDA 4, Dream 8) drafts commit one
    more of the most confident undecided positions of the window each.  One forward pass reads them
    all.  A draft is confirmed if ``base``, applied to a confirmed draft before it, commits exactly
    the same.  A window that slides does so in every draft, which no cache can follow.  ``base``
    is one token per step unless another is given.  The text equals that of
    ``base`` alone under the same cache where batched and single forward passes agree: in float32
    except for exact ties, almost always in bfloat16.  ``partial`` also keeps a draft that is only a
    part of what ``base`` commits, as the paper's FreeDave++ does (with ``threshold(0.95)``): faster
    with such bases, and no longer exactly their text.
    """

    needs = frozenset({
        BRANCHES, CONSTRAINED, FINAL, GREEDY, KEEPS_TEXT, REPEATABLE, SLIDING_BRANCHES,
    })  # fmt: skip
    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"draft_depth": 4},
        "dream": {"draft_depth": 8},
    }
    limits = bounds(draft_depth=LANES)

    base: tuple[Part, ...] = ()
    draft_depth: int | None = None
    partial: bool = False

    @property
    def width(self) -> int:
        return self.draft_depth or 4

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Fixed(),)

    def decide(self, turn: Turn) -> None:
        if turn.feed.branches:
            turn.keep(self._confirmed(turn))
        turn.go_on()
        if turn.goes_on:
            order = np.argsort(-turn.view.score, kind="stable")
            order = order[~turn.chosen[order]][: self.width - 1]
            drafts = np.zeros((len(order) + 1, len(turn.chosen)), np.bool_)
            for j, i in enumerate(order):
                drafts[j + 1 :, i] = True
            turn.try_next(list(drafts) if order.size else [])

    def _confirmed(self, turn: Turn) -> int:
        branches = [seen.canvas for seen in turn.seen]
        result = [seen.prediction.of_window(seen.canvas) for seen in turn.seen]
        best = 0
        while True:
            target = branches[best].fork()
            if not len(result[best].positions):
                return best  # the window is decided: nothing to confirm beyond it
            turn.usual(target, result[best])
            drafts = range(best + 1, len(branches))
            agreed = [j for j in drafts if _follows(branches[j], target, self.partial)]
            if not agreed:
                return best
            best = agreed[-1]


def _follows(draft: Canvas, target: Canvas, partial: bool) -> bool:
    """Whether the draft is the target, or at least a part of it."""
    here = slice(draft.start, draft.end)
    decided, reached = ~draft.masked[here], ~target.masked[here]
    if (decided & ~reached).any() or (not partial and (reached & ~decided).any()):
        return False
    return bool((draft.tokens[here][decided] == target.tokens[here][decided]).all())
