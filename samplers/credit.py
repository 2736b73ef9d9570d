"""Credit decoding: what the model kept saying counts too."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..core.canvas import Canvas, Edit, FloatArray, IntArray
from ..core.capabilities import FRESH_LOGITS, GREEDY
from ..core.limits import FINITE, SHARE, bounds
from .base import NO_SCORES, NOTHING, Prediction, Reads, Transform
from .compose import register

LAST = np.iinfo(np.int64).max  # behind every id


@dataclass
class Ledger:
    """Ids with credit per position, (N, m), -1 where there is none, their credit, and how many
    there are, (N,).  Belongs to one block."""

    ids: IntArray = field(default_factory=lambda: NOTHING)
    credit: FloatArray = field(default_factory=lambda: NO_SCORES)
    count: IntArray = field(default_factory=lambda: NOTHING)

    def clear(self, n: int) -> None:
        self.ids, self.credit = np.full((n, 1), -1), np.zeros((n, 1), np.float32)
        self.count = np.zeros(n, np.int64)

    def moved(self, edit: Edit) -> None:
        self.ids, self.count = edit.spliced(self.ids, -1), edit.spliced(self.count, 0)
        self.credit = edit.spliced(self.credit, 0)


@register(
    "credit",
    paper="CreditDecoding: Accelerating Parallel Decoding in Diffusion Large Language Models "
    "with Trace Credits",
    arxiv="2510.06133",
)
class Credit(Transform):
    """Add to each logit ``credit_alpha`` x log(1 + credit), credit being a fading sum of wins.

    In every step all credit of an undecided position is multiplied by ``decay_beta`` (0.8) and
    its likeliest token gains p ** ``boost_gamma`` (0.2); ``credit_alpha`` 0.7, all as in dInfer
    (arXiv 2510.08666).  Cleared with each block.  Proposals and probabilities are those of the
    raised logits; margin and entropy stay the model's.  Only ids with credit are looked up.
    """

    needs = frozenset({GREEDY, FRESH_LOGITS})
    statistics: ClassVar = {"max_logprob": 1}
    limits = bounds(credit_alpha=FINITE, boost_gamma=FINITE, decay_beta=SHARE)

    credit_alpha: float = 0.7
    boost_gamma: float = 0.2
    decay_beta: float = 0.8

    def begin_block(self, canvas: Canvas) -> None:
        canvas.state(Ledger).clear(len(canvas.tokens))

    def reads(self, canvas: Canvas) -> Reads:
        return Reads(ids=np.maximum(canvas.state(Ledger).ids, 0))

    def apply(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        ledger, at = canvas.state(Ledger), prediction.positions
        known = prediction.asked[self.name]
        first = prediction.logprob if prediction.max_logprob is None else prediction.max_logprob
        ids, credit, likeliest = self._pay(ledger, at, prediction.token, first)
        # A column may have been added for tokens that win for the first time: these are on top.
        if known.shape[1] < ids.shape[1]:
            known = np.pad(known, ((0, 0), (0, ids.shape[1] - known.shape[1])))
        base = np.where(ids < 0, np.float32(-np.inf), known)
        base[likeliest] = first
        raised = base + self.credit_alpha * np.log1p(credit)
        # Equal logits go to the lowest id, as everywhere.
        best = raised.max(1)
        winner = np.where(raised == best[:, None], ids, LAST).min(1)
        rest = np.maximum(1 - np.exp(base).sum(1), 0) * np.exp(-best)  # of the other ids
        logprob = -np.log(rest + np.exp(raised - best[:, None]).sum(1))
        p = prediction  # spelt out: `replace` takes twice as long
        return Prediction(
            at, winner, logprob, p.margin, p.gap, p.entropy, logprob, p.top_token,
            p.top_logprob, p.asked,
        )  # fmt: skip

    def _pay(
        self, ledger: Ledger, at: IntArray, token: IntArray, first: FloatArray
    ) -> tuple[IntArray, FloatArray, tuple[IntArray, IntArray]]:
        """Fade all credit of ``at``, raise that of its likeliest tokens; ids and credit, (n, m),
        and where in these the likeliest stand."""
        ids = ledger.ids[at]
        same = ids == token[:, None]
        rows, column, count = np.arange(len(at)), same.argmax(1), ledger.count[at]
        column = np.where(same[rows, column], column, count)
        if np.count_nonzero(column == ledger.ids.shape[1]):
            ledger.ids = np.pad(ledger.ids, ((0, 0), (0, 1)), constant_values=-1)
            ledger.credit = np.pad(ledger.credit, ((0, 0), (0, 1)))
            ids = ledger.ids[at]
        credit = ledger.credit[at]
        credit *= self.decay_beta
        ids[rows, column] = token
        credit[rows, column] += np.exp(self.boost_gamma * first)  # p ** gamma
        ledger.ids[at], ledger.credit[at] = ids, credit
        ledger.count[at] = np.maximum(count, column + 1)
        return ids, credit, (rows, column)
