"""FLy: a rejected token may stay where the verifier was unsure and agrees again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import ConfigError
from ..base import RULES, AcceptRule, Draft, Outcome
from .pivot import _entropy
from .rows import Rows


@RULES.register("fly", paper="Training-Free Loosely Speculative Decoding: Accepting Semantically "
                "Correct Drafts Beyond Exact Match", arxiv="2511.22972")  # fmt: skip
@dataclass
class FLy(AcceptRule):
    """LOSSY. Keep a token that differs from the verifier's where the verifier hesitates and then
    follows the draft.

    It hesitates where its entropy over the logarithm of the vocabulary size is at least
    ``entropy``; it follows where it agrees with the next ``window`` drafted tokens, all of which
    must be there.  Constants of the paper.
    """

    entropy: float = 0.3
    window: int = 6

    lossy = True

    def __post_init__(self) -> None:
        if not 0 <= self.entropy <= 1 or self.window < 0:
            raise ConfigError("fly takes entropy in [0, 1] and window >= 0")

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        own = [rows.keyed(node - 1) for node in range(len(draft) + 1)]
        same = draft.tokens == own[:-1]
        deviations = 0
        for node in np.flatnonzero(~same).tolist():
            ahead = same[node + 1 : node + 1 + self.window]
            sure = _entropy(rows, node - 1) < self.entropy
            if sure or len(ahead) < self.window or not ahead.all():
                return Outcome(list(range(node)), own[node], deviations)
            deviations += 1
        return Outcome(list(range(len(draft))), own[-1], deviations)
