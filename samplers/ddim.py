"""Reverse steps of uniform diffusion: every position takes the prediction, stays, or is redrawn."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..core.canvas import SELECTION, Canvas, IntArray
from ..core.capabilities import UNIFORM_NOISE
from ..core.limits import COUNT, NOT_NEGATIVE, bounds
from .compose import register
from .entropy_bound import Settled
from .turn import Reviser


@register(
    "ddim", paper="Structured Denoising Diffusion Models in Discrete State-Spaces",
    arxiv="2107.03006",
)  # fmt: skip
class DDIM(Reviser):
    """Step a canvas back along the posterior of uniform noise, given what the model predicts.

    Of ``num_inference_steps`` (16) steps per canvas, step k goes from a signal of k/N to one of
    (k+1)/N: each position takes the predicted token, keeps its own, or becomes random, with the
    probabilities of that posterior (D3PM; diffusers' ``DiscreteDDIMScheduler``).  The last step
    takes every prediction.  ``temperature`` draws predictions.  The canvas ends early when the
    likeliest tokens are those of the last ``stability_threshold`` (1) steps and their mean entropy
    is below ``confidence_threshold`` (0: never).
    """

    needs = frozenset({UNIFORM_NOISE})
    statistics: ClassVar = {"entropy": 1, "top_token": 1, "top_logprob": 1}
    limits = bounds(
        num_inference_steps=COUNT, stability_threshold=COUNT, confidence_threshold=NOT_NEGATIVE
    )

    num_inference_steps: int = 16
    stability_threshold: int = 1
    confidence_threshold: float = 0.0
    vocab_size: int | None = None  # the model's

    def begin_block(self, canvas: Canvas) -> None:
        canvas.states[Settled] = Settled()

    def decide(self, turn: Any) -> None:
        canvas, p = turn.canvas, turn.view.prediction
        k, steps, ids = canvas.block_step, self.num_inference_steps, self.vocab_size or 1
        likeliest = p.top_token[:, 0]
        everything = np.ones(len(likeliest), np.bool_)
        if canvas.state(Settled).settled(
            likeliest, p.entropy, self.stability_threshold, self.confidence_threshold
        ):
            turn.choose_these(everything, likeliest, p.top_logprob[:, 0])
        elif k + 1 >= steps:
            turn.choose_these(everything)
        else:
            here = fed(canvas, p.positions, ids)
            kept, after = k / (k + 1), (k + 1) / steps
            same = kept * after * (here == p.token)
            takes = after * (1 - kept) / ids + same
            stays, leaves = kept * (1 - after) / ids, (1 - kept) * (1 - after) / ids
            drawn = canvas.uniform(SELECTION, p.positions) * (takes + stays + leaves)
            moved = np.where(drawn < takes, p.token, np.where(drawn < takes + stays, here, -1))
            canvas.hold(p.positions, moved)
            turn.choose_these(~everything)
        turn.go_on()


def fed(canvas: Canvas, positions: IntArray, ids: int) -> IntArray:
    """(n,) tokens that undecided ``positions`` were fed as in this step."""
    tokens = canvas.tokens[positions]
    return np.where(tokens < 0, canvas.random_ids(positions, ids), tokens)
