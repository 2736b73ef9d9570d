"""The length with the most expected tokens per second, by what was measured here."""

import copy
from dataclasses import dataclass

import numpy as np

from ..base import Array, Budget, Feedback, RoundStats
from .acceptance import Acceptance
from .control import CONTROLLERS, LengthController, at_least

FIRST = 4  # tokens of a first draft
CONTEXT = 512  # tokens of a text whose forwards are taken to cost the same


class Costs:
    """Seconds of a forward by the tokens that it is fed, of late.  What was never measured lies
    between its neighbours or, behind the last one, on the line from the first through that, and
    counts as a tenth cheaper, so that it is tried."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}

    def add(self, tokens: int, seconds: float) -> None:
        known = self.known.get(tokens, seconds)
        # one stalled measurement must not decide anything
        self.known[tokens] = known + 0.2 * (min(seconds, 4 * known) - known)

    def __call__(self, tokens: Array) -> Array:
        at = sorted(self.known) or [1]
        taken = [self.known.get(n, 1.0) for n in at]
        slope = max(0.0, taken[-1] - taken[0]) / max(1, at[-1] - at[0])
        line: Array = np.interp(tokens, at, taken) + slope * np.maximum(0, tokens - at[-1])
        return line * np.where(np.isin(tokens, at), 1.0, 0.9)


class Learned:
    """What all texts share: costs by context, seconds of a draft, and of late, in plain tokens,
    what a draft ``saved`` and what one costs that does not pay."""

    def __init__(self) -> None:
        self.costs: dict[int, Costs] = {}
        self.drafting = self.saved = 0.0
        self.price = 0.5

    def of(self, context: int) -> Costs:
        """Of texts of this length: at first those of the nearest that was seen."""
        if context not in self.costs:
            near = min(self.costs, key=lambda at: abs(at - context), default=None)
            self.costs[context] = Costs()
            self.costs[context].known |= {} if near is None else self.costs[near].known
        return self.costs[context]


@CONTROLLERS.register("adaptive")
@dataclass
class Adaptive(LengthController):
    """The length with the most expected tokens per second, from this round's own confidences.

    Expected tokens come from calibrated acceptance, ``optimism`` standard errors above the estimate
    so that lengths which were never tried are; seconds from measured rounds.  In a batch both are
    those of the forward that all its texts share.  A text may lose by drafts what they have saved
    it, the price of ``loan`` failed ones and twice what a draft saves on average, nothing where
    drafts did not pay before; then it writes plainly and tries again as often as a share
    ``explore`` of its tokens pays for, or half of it there.  A design of this library: no paper's.
    """

    k_max: int = 24
    optimism: float = 0.2
    explore: float = 0.01
    loan: float = 3.0

    def __post_init__(self) -> None:
        at_least(1, k_max=self.k_max)
        self.acceptance, self.learned = Acceptance(), Learned()
        self._reset()

    def fresh(self) -> LengthController:
        one = copy.copy(self)  # what is known of drafter and machine is shared, the text is not
        one._reset()
        return one

    def _reset(self) -> None:
        self._after_whole = False
        self._context = self._beside = self._beside_emitted = 0
        saved, price = self.learned.saved, self.learned.price
        self._credit, self._share = self.loan * price + 2 * saved, self.explore
        if saved < 0:
            self._credit, self._share = 0.0, self.explore / 2

    def next(self, room: int, context: int) -> Budget:
        self._context = context // CONTEXT
        costs = self.learned.of(self._context)
        # after the first draft one plain round, which drafts are compared with
        unmeasured = costs.known and 1 + self._beside not in costs.known
        if unmeasured or self._credit <= 0:
            return Budget(0, room)
        return Budget(min(self.k_max, room), room, self._refine, self._worth_it)

    def _refine(self, confidence: Array) -> int:
        confidence = confidence[: self.k_max]
        sure = self.acceptance(confidence, self._after_whole, self.optimism)
        return self._worth_it(np.cumprod(sure, dtype=np.float64))

    def _worth_it(self, alive: Array) -> int:
        """How many tokens to send that are accepted with chances ``alive`` (n,), at most twice as
        many as were ever sent: what a long forward costs here is learnt on the way."""
        costs = self.learned.of(self._context)
        alive = alive[: max(FIRST, 2 * max(costs.known, default=1) - self._beside)]
        emitted = self._beside_emitted + 1 + np.concatenate([[0.0], alive.cumsum()])
        fed = self._beside + 1.0 + np.arange(len(alive) + 1, dtype=np.float64)
        return int(np.argmax(emitted / (costs(fed) + self.learned.drafting)))

    def update(self, stats: RoundStats, feedback: Feedback) -> None:
        draft = feedback.draft
        if draft.is_chain and draft.confidence is not None and len(draft):
            confidence = np.asarray(draft.confidence, np.float64)
            self.acceptance.update(confidence, stats.accepted, self._after_whole)
        if stats.depth:
            self._after_whole = stats.depth == stats.accepted
        if stats.first:  # it read the prompt, too
            return
        learned, costs = self.learned, self.learned.of(self._context)
        self._beside, self._beside_emitted = stats.beside, stats.beside_emitted
        verifying = stats.verify_seconds + stats.other_seconds
        costs.add(1 + stats.beside + stats.drafted, verifying)
        if not stats.attempted:
            self._credit += self._share * stats.emitted
            return
        learned.drafting += 0.2 * (stats.draft_seconds - learned.drafting)
        plain = float(costs(np.array([1 + stats.beside]))[0])
        token = plain / (1 + stats.beside_emitted)  # seconds of one without drafts
        saved = stats.emitted - 1 - (verifying + stats.draft_seconds - plain) / token
        learned.saved += 0.01 * (saved - learned.saved)
        learned.price += 0.1 * (max(-saved, 0.0) - learned.price) * (saved < 0)
        self._credit += saved
