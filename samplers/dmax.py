"""DMax: decided tokens are fed as mixtures of what they might be, and decided again."""

from dataclasses import dataclass, field

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.capabilities import (
    ALL_LOGITS,
    FIXED_WINDOW,
    GREEDY,
    KEEPS_TEXT,
    MASKED,
    OWN_PREDICTIONS,
)
from ..core.limits import COUNT, SHARE, bounds
from .base import NOTHING, Reads
from .compose import register
from .turn import THE_ROW, Feed, Mixture, Reviser, Turn


@dataclass
class Active:
    """The ``positions`` that were masks when the block opened, and what decided ones are fed as."""

    positions: IntArray = field(default_factory=lambda: NOTHING)
    mixture: Mixture | None = None


@register("dmax", paper="DMax: Aggressive Parallel Decoding for dLLMs", arxiv="2604.08302")
class DMax(Reviser):
    """Commit the leftmost confident run; revise what is decided from soft inputs until it settles.

    Each step commits the masks of the block from its first one on, as long as their probability
    reaches ``threshold`` (0.5), one at least, and gives every decided position of the block the
    model's present choice.  In the next forward a decided position is fed as the embeddings of its
    ``top_k`` (1) likeliest tokens, weighted by their probabilities, with the mask's for what is
    left, at their mean length.  A block ends when all of it reaches ``settled`` (0.9), when nothing
    changes, or after as many steps as it has positions.
    """

    needs = frozenset({FIXED_WINDOW, GREEDY, KEEPS_TEXT, MASKED, OWN_PREDICTIONS, ALL_LOGITS})
    limits = bounds(threshold=SHARE, top_k=COUNT, settled=SHARE, block=COUNT)

    threshold: float = 0.5
    top_k: int = 1
    settled: float = 0.9
    block: int | None = None  # the model's, or ``block_length``

    @property
    def statistics(self) -> dict[str, int]:  # type: ignore[override]
        return {"top_token": self.top_k, "top_logprob": self.top_k}

    def begin_block(self, canvas: Canvas) -> None:
        canvas.states[Active] = Active(canvas.masks())

    def reads(self, canvas: Canvas) -> Reads:
        return Reads(canvas.state(Active).positions)

    def feeds(self, canvas: Canvas) -> Feed:
        mixture = canvas.state(Active).mixture
        return THE_ROW if mixture is None else Feed(mixture=mixture)

    def decide(self, turn: Turn) -> None:
        canvas, active = turn.canvas, turn.canvas.state(Active)
        most = min(self.block or canvas.window[1] - canvas.window[0], canvas.length)
        p = turn.view.all_predictions.at(active.positions)
        assert p.top_token is not None and p.top_logprob is not None
        sure, old = np.exp(p.logprob), ~canvas.masked[p.positions]
        run = int(np.append(sure[~old] < self.threshold, True).argmax())
        chosen = np.arange(len(turn.view.positions)) < max(1, run)
        changed = p.take(old & (p.token != canvas.tokens[p.positions]))
        stops = bool((sure >= self.settled).all()) or canvas.block_step + 1 >= most
        stops |= not (len(chosen) or len(changed.positions))
        turn.choose_these(chosen | stops)
        turn.commit()
        turn.rewrite(changed.positions, changed.token, changed.logprob)
        now = ~canvas.masked[p.positions]
        active.mixture = None if stops else Mixture(
            p.positions[now], p.top_token[now, : self.top_k],
            np.exp(p.top_logprob[now, : self.top_k]),
        )  # fmt: skip
        turn.open = not stops
        turn.go_on()
