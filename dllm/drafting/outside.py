"""Drafts that come from outside: from a device that drafts itself, and sends what it proposes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.canvas import IntArray
from .base import EMPTY, Budget, Draft, Drafter, Drafting, DraftRequest


@dataclass(eq=False)
class Outside(Drafter):
    """The drafts of one text, one by one.  The text waits until the next one is offered."""

    outside = True

    offered: Draft | None = field(default=None, repr=False)

    def offer(self, draft: Draft) -> None:
        """Have ``draft`` verified next; it may be empty."""
        self.offered = draft

    def open(self, request: DraftRequest) -> Drafting:
        return _Waiting(self)


class _Waiting(Drafting):
    def __init__(self, part: Outside) -> None:
        self.part = part

    @property
    def waits(self) -> bool:
        return self.part.offered is None

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        draft, self.part.offered = self.part.offered, None
        return EMPTY if draft is None else draft
