"""Prompt lookup: copy what followed the present n-gram before."""

from dataclasses import dataclass

import numpy as np

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ..base import DRAFTERS, EMPTY, Budget, Draft, Drafter, Drafting, DraftRequest, Feedback
from .hits import HitRates


def last_match(tokens: IntArray, n: int) -> int:
    """Where the latest earlier occurrence of the last ``n`` tokens ends (exclusive); -1 if none."""
    if n == 0 or len(tokens) <= n:
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
    result = np.flatnonzero((windows == tokens[-n:]).all(1))
    return int(result[-1]) + n if result.size else -1


@DRAFTERS.register("prompt_lookup", paper="Prompt Lookup Decoding (github.com/apoorvumang)")
@dataclass
class PromptLookup(Drafter):
    """Copy what followed the last n-gram the last time, trying longer n-grams first.

    n-grams of ``n`` down to ``least`` tokens, at most ``k`` tokens copied.  Its confidence is how
    often copies after an n-gram of that length were right so far.
    """

    n: int = 3
    k: int = 10
    least: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.n or self.k < 1:
            raise ConfigError("prompt_lookup takes 1 <= least <= n and k >= 1")
        self.hits = HitRates()

    def open(self, request: DraftRequest) -> Drafting:
        return _Copying(self)


class _Copying(Drafting):
    def __init__(self, part: PromptLookup) -> None:
        self.part, self.matched = part, 0

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        for n in range(min(self.part.n, len(prefix)), self.part.least - 1, -1):
            at = last_match(prefix, n)
            if at >= 0:
                self.matched = n
                tokens = prefix[at : at + self.part.k]
                return budget.chain(tokens, [self.part.hits(n)] * len(tokens), self.part.name)
        return EMPTY

    def observe(self, feedback: Feedback) -> None:
        if feedback.draft.source == self.part.name and len(feedback.draft):
            self.part.hits.update_chain(self.matched, feedback.accepted, len(feedback.draft))
