"""The anti-loop rule that SGLang has for edited text: do not say the same token twice in a row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.capabilities import GREEDY
from ..core.limits import NOT_NEGATIVE, bounds
from .base import Prediction, Transform
from .compose import register


@register("anti_loop", paper="LLaDA2.1: Speeding Up Text Diffusion via Token Editing",
          arxiv="2602.08676")  # fmt: skip
class AntiLoop(Transform):
    """Take ``penalty`` (1.0) from the logit of the token that stands one position to the left.

    As in SGLang's decoder of LLaDA2.1, where it keeps ``edit`` from filling a block with one token;
    it has no default there.  Proposals and probabilities are those of the lowered logits; margin,
    entropy and ``max_logprob`` stay the model's.
    """

    needs = frozenset({GREEDY})
    statistics = frozenset({"top_token", "top_logprob"})
    limits = bounds(penalty=NOT_NEGATIVE)

    penalty: float = 1.0

    @property
    def candidates(self) -> int:
        return 2

    def asks(self, canvas: Canvas, positions: IntArray) -> IntArray:
        return canvas.tokens[np.maximum(positions - 1, 0)][:, None]

    def apply(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        p = prediction
        assert p.top_token is not None and p.top_logprob is not None, "asked for by name"
        beside = np.maximum(p.positions - 1, 0)
        known = (p.positions > 0) & ~canvas.masked[beside]  # a mask is nothing that was said
        left = np.where(known, canvas.tokens[beside], -1)
        said = np.where(known, p.asked[self.name][:, 0], -np.inf)
        total = np.log1p(-np.exp(said) * (1 - np.exp(-self.penalty)))  # of what is left, 1 before
        again = p.token == left
        other = np.where(p.top_token[:, 0] == left, p.top_token[:, 1], p.top_token[:, 0])
        second = np.where(p.top_token[:, 0] == left, p.top_logprob[:, 1], p.top_logprob[:, 0])
        lowered = p.logprob - self.penalty
        leave = again & (second > lowered)
        token = np.where(leave, other, p.token)
        logprob = np.where(leave, second, np.where(again, lowered, p.logprob)) - total
        return replace(p, token=token, logprob=logprob.astype(np.float32))
