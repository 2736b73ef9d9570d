"""A cascade: a cheap drafter drafts for a better one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...canvas import IntArray
from ..base import (
    DRAFTERS,
    Array,
    Budget,
    Distribution,
    Draft,
    Drafting,
    DraftRequest,
)
from .first_of import _FirstOf, _Several


class _Cascading(_FirstOf):
    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        draft = self.members[0].propose(prefix, budget)
        for member in self.members[1:]:
            draft = self._checked(member, prefix, draft, budget)
        return draft

    def _checked(self, member: Drafting, prefix: IntArray, guess: Draft, budget: Budget) -> Draft:
        """What ``member`` drafts, given what it agrees with in ``guess``."""
        own = member.propose(prefix, budget)
        if not own.is_chain or not guess.is_chain or own.distribution is not Distribution.POINT:
            return own
        length = min(len(own), len(guess))
        same = own.tokens[:length] == guess.tokens[:length]
        agreed = length if same.all() else int(same.argmin())
        left = budget.length - agreed
        if agreed == 0 or left < 1:
            return own
        context = np.concatenate([prefix, guess.tokens[:agreed]])
        rest = member.propose(context, replace(budget, length=left, room=budget.room - agreed))
        if not rest.is_chain or len(rest) + agreed < len(own):
            return own
        sure = [_sureness(own)[:agreed], _sureness(rest)]
        end = None if rest.end is None else rest.end + agreed
        return Draft(
            np.concatenate([guess.tokens[:agreed], rest.tokens]), confidence=np.concatenate(sure),
            end=end, source=self.several.name,
            search_seconds=own.search_seconds + rest.search_seconds,
        )  # fmt: skip


def _sureness(draft: Draft) -> Array:
    known = draft.confidence
    return np.ones(len(draft)) if known is None else np.asarray(known, np.float64)


@DRAFTERS.register("cascade")
@dataclass
class Cascade(_Several):
    """A drafter of drafters: each level drafts for the next, the last for the verifier.

    ``cascade(a+b)``: b drafts; where the tokens of a cheap a agree with it from the start on, b
    drafts once more behind them, now with these tokens as context instead of masks.  The draft is
    what they agreed on and what b says then.  With more drafters the first two are a drafter for
    the third, and so on.
    """

    def open(self, request: DraftRequest) -> Drafting:
        return _Cascading(self, request)
