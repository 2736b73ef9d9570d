"""Drafters made of drafters: the first with a draft, and a cascade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ..base import (
    DRAFTERS,
    EMPTY,
    Array,
    Budget,
    Distribution,
    Draft,
    Drafter,
    Drafting,
    DraftRequest,
    Feedback,
)


class _FirstOf(Drafting):
    def __init__(self, several: _Several, request: DraftRequest) -> None:
        self.several = several
        self.members = [drafter.open(request) for drafter in several.drafters]

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        for member in self.members:
            draft = member.propose(prefix, budget)
            if len(draft):
                return draft
        return EMPTY

    def observe(self, feedback: Feedback) -> None:
        for drafter, member in zip(self.several.drafters, self.members, strict=True):
            member.observe(_shown(feedback, self.several.taps, drafter.taps))

    def close(self) -> None:
        for member in self.members:
            member.close()


def _shown(feedback: Feedback, taps: tuple[int, ...], own: tuple[int, ...]) -> Feedback:
    """``feedback`` with the outputs of the layers ``own`` out of those of all ``taps``."""
    if feedback.hidden is None or taps == own:
        return feedback
    width = feedback.hidden.shape[1] // len(taps)
    columns = [i * width + j for i in map(taps.index, own) for j in range(width)]
    return replace(feedback, hidden=feedback.hidden[:, columns] if own else None)


@dataclass
class _Several(Drafter):
    drafters: tuple[Drafter, ...] = ()

    def __post_init__(self) -> None:
        if len(self.drafters) < 1 or not all(isinstance(d, Drafter) for d in self.drafters):
            raise ConfigError(
                f"{self.name} takes drafters joined with '+', e.g. {self.name}(prompt_lookup+anpd)"
            )

    @property
    def distributions(self) -> frozenset[Distribution]:  # type: ignore[override]
        return frozenset().union(*(drafter.distributions for drafter in self.drafters))

    @property
    def trees(self) -> bool:  # type: ignore[override]
        return any(drafter.trees for drafter in self.drafters)

    @property
    def taps(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(tap for drafter in self.drafters for tap in drafter.taps))


@DRAFTERS.register("first_of")
@dataclass
class FirstOf(_Several):
    """The first drafter that has something to say, e.g. a lookup before a model."""

    def open(self, request: DraftRequest) -> Drafting:
        return _FirstOf(self, request)

    def propose_all(self, work: Sequence[tuple[Any, IntArray, Budget]]) -> list[Draft]:
        """Drafter by drafter: each drafts at once for all texts that have no draft yet."""
        drafts = [EMPTY] * len(work)
        for place, drafter in enumerate(self.drafters):
            left = [i for i, draft in enumerate(drafts) if not len(draft)]
            if left:
                asked = [(work[i][0].members[place], *work[i][1:]) for i in left]
                for i, draft in zip(left, drafter.propose_all(asked), strict=True):
                    drafts[i] = draft
        return drafts


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
