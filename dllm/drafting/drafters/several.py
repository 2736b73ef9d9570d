"""Several drafters in order: the first one with a draft drafts."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from .. import base


@base.DRAFTERS.register("first_of")
@dataclass
class FirstOf(base.Drafter):
    """The first non-empty draft of its drafters, in order, e.g. prompt lookup before a model."""

    drafters: tuple[base.Drafter, ...] = ()

    def __post_init__(self) -> None:
        if len(self.drafters) < 1 or not all(isinstance(d, base.Drafter) for d in self.drafters):
            raise ConfigError(
                "first_of takes drafters joined with '+', e.g. first_of(prompt_lookup+suffix)"
            )

    @property
    def distributions(self) -> frozenset[base.Distribution]:  # type: ignore[override]
        return frozenset().union(*(drafter.distributions for drafter in self.drafters))

    @property
    def trees(self) -> bool:  # type: ignore[override]
        return any(drafter.trees for drafter in self.drafters)

    @property
    def target_layer_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(i for one in self.drafters for i in one.target_layer_ids))

    def open(self, request: base.DraftRequest) -> base.Drafting:
        members: list[base.Drafting] = []
        with ExitStack() as opened:
            for drafter in self.drafters:
                members.append(drafter.open(request))
                opened.callback(members[-1].close)
            return _FirstOf(self, members, opened.pop_all())

    def propose_all(self, work: Sequence[tuple[Any, IntArray, base.Budget]]) -> list[base.Draft]:
        """Drafter by drafter: each drafts at once for all texts that have no draft yet."""
        drafts = [base.EMPTY] * len(work)
        for place, drafter in enumerate(self.drafters):
            left = [i for i, draft in enumerate(drafts) if not len(draft)]
            if left:
                asked = [(work[i][0].members[place], *work[i][1:]) for i in left]
                for i, draft in zip(left, drafter.propose_all(asked), strict=True):
                    drafts[i] = draft
        return drafts


@dataclass
class _FirstOf(base.Drafting):
    part: FirstOf
    members: list[base.Drafting]
    opened: ExitStack  # that closes them all, whichever of them raises

    def observe(self, feedback: base.Feedback) -> None:
        for drafter, member in zip(self.part.drafters, self.members, strict=True):
            member.observe(_shown(feedback, self.part.target_layer_ids, drafter.target_layer_ids))

    def close(self) -> None:
        self.opened.close()


def _shown(feedback: base.Feedback, given: tuple[int, ...], own: tuple[int, ...]) -> base.Feedback:
    """``feedback`` with the hidden states behind the layers ``own`` out of those ``given``."""
    if feedback.hidden is None or given == own:
        return feedback
    width = feedback.hidden.shape[1] // len(given)
    columns = [i * width + j for i in map(given.index, own) for j in range(width)]
    return replace(feedback, hidden=feedback.hidden[:, columns] if own else None)
