"""Drafters that copy what followed the present n-gram before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.canvas import IntArray
from ...core.errors import ConfigError
from ..base import DRAFTERS, EMPTY, Budget, Draft, Drafter, Drafting, DraftRequest, Feedback
from .followers import Followers
from .hits import HitRates

register = DRAFTERS.register


def last_match(tokens: IntArray, n: int) -> int:
    """Where the latest earlier occurrence of the last ``n`` tokens ends (exclusive); -1 if none."""
    if n == 0 or len(tokens) <= n:
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
    result = np.flatnonzero((windows == tokens[-n:]).all(1))
    return int(result[-1]) + n if result.size else -1


@register("prompt_lookup", paper="Prompt Lookup Decoding (github.com/apoorvumang)")
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
        for n in range(self.part.n, self.part.least - 1, -1):
            at = last_match(prefix, n)
            if at >= 0:
                self.matched = n
                tokens = prefix[at : at + self.part.k]
                return budget.chain(tokens, [self.part.hits(n)] * len(tokens), self.part.name)
        return EMPTY

    def observe(self, feedback: Feedback) -> None:
        if feedback.draft.source == self.part.name and len(feedback.draft):
            hits = self.part.hits
            hits.update_chain(self.matched, feedback.accepted, len(feedback.draft))


@register(
    "anpd",
    paper="Lossless Acceleration of Large Language Model via Adaptive N-gram Parallel Decoding",
    arxiv="2404.08698",
)
@dataclass
class AdaptiveNGram(Drafter):
    """A multi-level n-gram table of the text so far, extended one token at a time.

    Every step of a draft takes the most frequent successor of the longest known context of up to
    ``n`` - 1 tokens.  The draft grows by ``grow`` after it was accepted whole and is cut back to
    what was accepted otherwise (adaptation reconstructed), within [1, ``k_max``].  A token's
    confidence is its share times how often contexts of that length were right so far.
    """

    n: int = 5
    k: int = 6
    k_max: int = 24
    grow: int = 2

    def __post_init__(self) -> None:
        if self.n < 2 or not 1 <= self.k <= self.k_max:
            raise ConfigError("anpd takes n >= 2 and 1 <= k <= k_max")
        self.hits = HitRates()

    def open(self, request: DraftRequest) -> Drafting:
        return _NGrams(self)


@dataclass
class _NGrams(Drafting):
    part: AdaptiveNGram

    def __post_init__(self) -> None:
        self.length, self.counts = self.part.k, Followers(range(1, self.part.n))

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        self.counts.learn(prefix)
        text: list[int] = prefix[-self.part.n :].tolist()
        drafted: list[int] = []
        confidence: list[float] = []
        self.levels: list[int] = []
        while len(drafted) < min(self.length, budget.length):
            level, seen = next(self.counts.behind(text + drafted), (0, {}))
            if not seen:
                break
            most = max(seen.values())  # of equal counts the later occurrence
            drafted.append([token for token, count in seen.items() if count == most][-1])
            self.levels.append(level)
            confidence.append(most / sum(seen.values()) * self.part.hits(level))
        return budget.chain(drafted, confidence, self.part.name)

    def observe(self, feedback: Feedback) -> None:
        drafted = len(feedback.draft)
        if feedback.draft.source != self.part.name or not drafted:
            return
        for i, level in enumerate(self.levels[: min(feedback.accepted + 1, drafted)]):
            self.part.hits.update(level, int(i < feedback.accepted), 1)
        whole = feedback.accepted == drafted
        target = self.length + self.part.grow if whole else feedback.accepted + 1
        self.length = int(np.clip(target, 1, self.part.k_max))
