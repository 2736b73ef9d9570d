"""LLaDA2.1's editing: replace decided tokens that the model no longer believes, or remask them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ..core.canvas import BoolArray, Canvas, FloatArray, IntArray
from ..core.canvas import Edit as Change
from ..core.capabilities import (
    CONSTRAINED,
    FIXED_WINDOW,
    KEEPS_TEXT,
    OWN_PREDICTIONS,
    REPLACES,
    WINDOW_LOGITS,
    Capability,
)
from ..core.errors import ConfigError
from ..core.limits import COUNT, NOT_NEGATIVE, SOME_SHARE, THRESHOLD, bounds, one_of
from .base import NO_SCORES, NOTHING, Part, Prediction, Reads, View, top
from .compose import register
from .eos import stops
from .threshold import Threshold
from .turn import Reviser, Turn

# What makes a decided token a suspect -> the threshold that its authors use.
MODES: Mapping[str, float] = {"t2t": 0.5, "low_prob": 0.1, "t2t_remask": 0.9, "logit_diff": 0.3}


@dataclass
class Edits:
    """Forwards that found the block decided (``post``); how often each position was remasked in it
    (N,); what its token had as probability in the last forward (N,), NaN where none is known."""

    post: int = 0
    counts: IntArray = field(default_factory=lambda: NOTHING)
    before: FloatArray = field(default_factory=lambda: NO_SCORES)

    def moved(self, edit: Change) -> None:
        self.counts, self.before = edit.spliced(self.counts, 0), edit.spliced(self.before, np.nan)


@register(
    "edit", paper="LLaDA2.1: Speeding Up Text Diffusion via Token Editing", arxiv="2602.08676"
)
class Edit(Reviser):
    """Replace or take back decided tokens of the block that the model would choose otherwise now.

    It looks at what earlier forwards decided, in every step and ``post_steps`` (16) more times when
    the block is decided, until nothing changes.

    ``mode`` "t2t" (token to token, LLaDA2.1): a token is replaced by the model's present choice
    where that is another one with probability above ``tau`` (0.5 as in the card's quality mode;
    its speed mode is ``threshold(tau=0.5)+edit(tau=0)``).

    The other modes are token-to-mask remasking (arXiv 2604.18738, training-free): a suspect returns
    to undecided.  "low_prob": the token's own probability is below ``tau`` (0.1); "t2t_remask":
    another one is above ``tau`` (0.9); "logit_diff": its probability has dropped by more than
    ``tau`` (0.3) since the last forward.  Each position at most ``per_position`` (3) times in a
    block, and at most the ``share`` (0.25; 1: no limit) of the decided positions in one forward,
    the worst ones first, at least one.  There a decided block that holds an end of text is not
    looked at again.

    New tokens come from ``threshold(tau=0.7)`` unless another selector is given;
    ``threshold(tau=0.7, n=2)`` commits at least two.
    """

    needs = frozenset({WINDOW_LOGITS, FIXED_WINDOW, KEEPS_TEXT, OWN_PREDICTIONS})
    limits = bounds(
        mode=one_of(MODES), tau=THRESHOLD, post_steps=NOT_NEGATIVE, per_position=COUNT,
        share=SOME_SHARE
    )  # fmt: skip

    tau: float | None = None
    mode: str = "t2t"
    post_steps: int = 16
    per_position: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "t2t" and (self.per_position, self.share) != (None, None):
            raise ConfigError("per_position and share limit remasking: choose a mode that does it")

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        return frozenset({REPLACES if self.mode == "t2t" else CONSTRAINED})

    def companions(self, family: str) -> tuple[Part, ...]:
        return (Threshold(tau=0.7),)

    def begin_block(self, canvas: Canvas) -> None:
        size = len(canvas.tokens)
        canvas.states[Edits] = Edits(0, np.zeros(size, np.int64), np.full(size, np.nan, np.float32))

    def reads(self, canvas: Canvas) -> Reads:
        low, high = canvas.window
        mine = ~canvas.masked[low:high] & ~canvas.given[low:high]
        own = None if self.mode == "t2t" else canvas.tokens[:, None]
        return Reads(mine.nonzero()[0] + low, own)

    def decide(self, turn: Turn) -> None:
        committed, view = turn.commit(), turn.view
        if turn.stopped():
            return
        canvas, p = view.canvas, view.all_predictions
        edits, (low, high) = canvas.state(Edits), canvas.window
        mine = (p.positions >= low) & (p.positions < high) & ~canvas.given[p.positions]
        earlier = canvas.commit_step[p.positions] < canvas.step
        old = p.take(mine & ~canvas.masked[p.positions] & earlier)
        if self.mode == "t2t":
            new = old.take(self._disagrees(canvas, old))
            turn.rewrite(new.positions, new.token, new.logprob)
            changed = new.positions
        else:
            changed = self._suspects(edits, canvas, old)
            turn.take_back(changed)
            edits.counts[changed] += 1
            edits.before[:] = np.nan
            if not len(old.positions):  # a block that is undecided altogether begins again
                edits.counts[:] = 0
            else:
                edits.before[old.positions] = np.exp(old.asked[self.name][:, 0])
                edits.before[committed] = np.exp(canvas.logprob[committed])
        turn.open = self._again(view, changed)

    def _again(self, view: View, changed: IntArray) -> bool:
        """Whether a block that is decided now deserves another forward."""
        canvas, edits = view.canvas, view.canvas.state(Edits)
        if canvas.masks().size or (len(changed) and self.mode != "t2t"):
            return False  # it is not decided
        if not (len(view.positions) or len(changed)):
            return False  # nothing has changed
        if self.mode != "t2t" and stops(canvas, *canvas.window, view.stop_ids).size:
            return False
        edits.post += 1
        return edits.post <= self.post_steps

    def _disagrees(self, canvas: Canvas, old: Prediction) -> BoolArray:
        """(n,) bool: where the model now clearly chooses another token."""
        another = old.token != canvas.tokens[old.positions]
        result: BoolArray = another & (np.exp(old.logprob) > self._tau)
        return result

    def _suspects(self, edits: Edits, canvas: Canvas, old: Prediction) -> IntArray:
        """Positions to remask, ascending."""
        at = old.positions
        own = np.exp(old.asked[self.name][:, 0]) if len(at) else NO_SCORES
        if self.mode == "low_prob":
            doubted, trust = own < self._tau, own
        elif self.mode == "t2t_remask":
            doubted, trust = self._disagrees(canvas, old), 1 - np.exp(old.logprob)
        else:
            trust = own - edits.before[at]
            doubted = trust < -self._tau  # nowhere where nothing is known
        doubted = doubted & (edits.counts[at] < (self.per_position or 3))
        share = 0.25 if self.share is None else self.share
        most = max(1, int(len(at) * share)) if share < 1 else len(at)
        if np.count_nonzero(doubted) > most:
            doubted = top(np.where(doubted, -trust, -np.inf).astype(np.float32), most)
        return at[doubted]

    @property
    def _tau(self) -> float:
        return MODES[self.mode] if self.tau is None else self.tau
