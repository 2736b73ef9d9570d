"""ANPD: n-gram counts that adapt to the text so far."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...canvas import IntArray
from ...errors import ConfigError
from ..base import Budget, Draft, Drafter, Drafting, Feedback, Request, chain
from .followers import Followers
from .hits import HitRates
from .prompt_lookup import register


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

    def open(self, request: Request) -> Drafting:
        return _NGrams(self)


@dataclass
class _NGrams(Drafting):
    part: AdaptiveNGram

    def __post_init__(self) -> None:
        self.length, self.counts = self.part.k, Followers(self.part.n - 1)

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
        length = budget.chain_length(np.array(confidence))
        return chain(drafted[:length], self.part.name, np.array(confidence[:length]))

    def observe(self, feedback: Feedback) -> None:
        drafted = len(feedback.draft)
        if feedback.draft.source != self.part.name or not drafted:
            return
        for i, level in enumerate(self.levels[: min(feedback.accepted + 1, drafted)]):
            self.part.hits.update(level, int(i < feedback.accepted), 1)
        whole = feedback.accepted == drafted
        target = self.length + self.part.grow if whole else feedback.accepted + 1
        self.length = int(np.clip(target, 1, self.part.k_max))
