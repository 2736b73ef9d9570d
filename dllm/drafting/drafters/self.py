"""A verifier that also fills in masks drafts for itself, in the forward that verifies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ...canvas import IntArray
from ...errors import ConfigError
from ..base import (
    DRAFTERS,
    ROOT,
    Budget,
    Distribution,
    Draft,
    Drafter,
    Drafting,
    DraftRequest,
    Feedback,
)


@DRAFTERS.register("self", paper="TiDAR: Think in Diffusion, Talk in Autoregression",
                   arxiv="2511.08923")  # fmt: skip
@dataclass
class SelfDrafter(Drafter):
    """One network that verifies and drafts at once: there is no second model and no second forward.

    Beside the ``masks`` drafted tokens a round feeds as many masks behind every token that might
    be the last accepted one, (masks + 1) x masks rows.  What they predict behind the one that was
    is the next draft.  The verifier's attention lets decided tokens see no mask: a converted model
    (`dllm train convert`) or one of family ``wedlm``.
    """

    needs_scores: ClassVar[bool] = True
    distributions: ClassVar[frozenset[Distribution]] = frozenset({Distribution.POINT})

    masks: int = 3

    def __post_init__(self) -> None:
        if self.masks < 1:
            raise ConfigError(f"masks must be at least 1, not {self.masks}")

    def open(self, request: DraftRequest) -> Drafting:
        facts = None if request.verifier is None else request.verifier.facts
        if facts is None or facts.mask_kind != "decided_first":
            raise ConfigError(
                "drafter='self' needs a verifier in this process that fills in masks behind "
                "decided tokens: load(model, adapter=...) of `dllm train convert`, or a model of "
                "family wedlm"
            )
        return SelfDrafting(self.masks, facts.mask_token_id, 1 - facts.logit_shift)


@dataclass
class SelfDrafting(Drafting):
    """What the masks of the last round said: ``tokens`` and their probabilities ``sure``."""

    masks: int
    mask_id: int
    skipped: int  # masks that predict the token which the verifier gives anyway
    tokens: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    sure: Any = field(default_factory=lambda: np.zeros(0))

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        length = budget.chain_length(self.sure)
        drafted = self.tokens[:length]
        branch = self.masks + self.skipped
        parents = [*range(ROOT, length - 1)]
        for last in range(ROOT, length):
            parents += [last, *range(len(parents), len(parents) + branch - 1)]
        tokens = np.full(len(parents), self.mask_id, np.int64)
        tokens[:length] = drafted
        probes = len(tokens) - length
        return Draft(tokens, np.asarray(parents, np.int64), confidence=self.sure[:length],
                     source="self", probes=probes)  # fmt: skip

    def observe(self, feedback: Feedback) -> None:
        self.tokens, self.sure = self.tokens[:0], self.sure[:0]
        draft = feedback.draft
        if not draft.probes:
            return
        branch = self.masks + self.skipped
        first = len(draft) - draft.probes + len(feedback.path) * branch + self.skipped
        rows = feedback.scores[1 + first : 1 + first + self.masks].clone().float()
        rows[:, self.mask_id] = -np.inf
        best = rows.softmax(-1).max(-1)
        self.tokens, self.sure = best.indices.cpu().numpy(), best.values.cpu().double().numpy()
