"""Accept rules that keep tokens which the verifier would not have written: lossy, opt-in.

Their texts are not the verifier's, and nothing bounds how far they drift.  What they emit is
counted: `SpeculativeResult.deviations`.  What a request bans or filters out is never kept.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ...core.errors import ConfigError
from ..base import RULES, AcceptRule, Draft, Outcome
from .rows import Rows


@RULES.register("fly", paper="Training-Free Loosely Speculative Decoding: Accepting Semantically "
                "Correct Drafts Beyond Exact Match", arxiv="2511.22972")  # fmt: skip
@dataclass
class FLy(AcceptRule):
    """LOSSY. Keep a token that differs from the verifier's where the verifier hesitates and then
    follows the draft.

    It hesitates where the entropy of its ``top`` (3) most probable tokens, the sum of -p ln p over
    these alone, before temperature and filters, is at least ``entropy`` nats; it follows where it
    agrees with the next ``window`` drafted tokens.  Constants of the paper, whose window of six
    counts the token itself; as in the official code the last six tokens of a draft are never
    relaxed.  vLLM asks for six that follow.
    """

    entropy: float = 0.3
    window: int = 5
    top: int = 3

    lossy = True

    def __post_init__(self) -> None:
        if not self.entropy >= 0 or self.window < 0 or self.top < 1:
            raise ConfigError("fly takes entropy >= 0, window >= 0 and top >= 1")

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        own = [rows.keyed(node - 1) for node in range(len(draft) + 1)]
        same = draft.tokens == own[:-1]
        deviations = 0
        for node in np.flatnonzero(~same).tolist():
            ahead = same[node + 1 : node + 1 + self.window]
            sure = self._hesitation(rows, node - 1) < self.entropy
            banned = not rows.may_follow(node - 1, int(draft.tokens[node]))
            late = len(draft) - node <= self.window + 1
            if sure or banned or late or not ahead.all():
                return Outcome(list(range(node)), own[node], deviations)
            deviations += 1
        return Outcome(list(range(len(draft))), own[-1], deviations)

    def _hesitation(self, rows: Rows, node: int) -> float:
        """Entropy of the most probable tokens after ``node``, in nats."""
        p = rows.logits[node + 1].float().softmax(-1)
        return float(torch.special.entr(p.topk(min(self.top, len(p))).values).sum())
