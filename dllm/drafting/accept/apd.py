"""Adaptive parallel decoding: the drafter writes, as far as the verifier would go along."""

from dataclasses import dataclass

import numpy as np
import torch

from ...core.errors import ConfigError
from ..base import RULES, AcceptRule, Draft, Outcome
from ..search.chains import SEARCHES, Coupled, SearchContext
from ..search.marginals import Marginals
from .rows import Rows

PAPER = "Accelerating Diffusion LLMs via Adaptive Parallel Decoding"


@SEARCHES.register("apd", paper=PAPER, arxiv="2506.00413")
@dataclass
class MixedDraft(Coupled):
    """As `coupled`, with the distributions that the accept rule ``apd`` mixes."""

    def find(self, marginals: Marginals, length: int, context: SearchContext) -> Draft:
        shown = context.shown(marginals, length, coupled=True)
        log_q = marginals.log_q[:length].cpu().numpy()
        return self.draft(marginals, shown.argmax[:length], log_q=log_q)


@RULES.register("apd", paper=PAPER, arxiv="2506.00413")
@dataclass
class AdaptiveParallel(AcceptRule):
    """LOSSY. Keep what a diffusion model drafts while it is what the two models prefer together.

    The text is the drafter's, ``weight`` 1, more than the verifier's, 0: a token stays while it is
    the one that ``weight`` x the drafter's log-probabilities + (1 - ``weight``) x the verifier's
    prefer (with the verifier's noise above temperature 0), and the first always does unless it is
    banned, so that every round writes something.  ``weight`` 0.7 is this library's choice.  For a
    diffusion drafter with ``search="apd"``.
    """

    weight: float = 0.7

    lossy = True
    beyond = 0

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise ConfigError(f"weight must lie in [0, 1], not {self.weight}")

    def judge(self, rows: Rows, draft: Draft) -> Outcome:
        if not len(draft):
            return Outcome([], rows.keyed(-1))
        if draft.log_q is None:
            raise ConfigError(
                "rule 'apd' mixes the distributions of both models: use search='apd' with a "
                "diffusion drafter"
            )
        if not rows.log_distribution[0, int(draft.tokens[0])] > -torch.inf:  # banned, filtered
            return Outcome([], rows.keyed(-1))
        verifier = rows.log_distribution[: len(draft)]
        drafter = torch.from_numpy(np.asarray(draft.log_q, np.float32)).to(verifier.device)
        mixed = self.weight * drafter + (1 - self.weight) * verifier.log_softmax(-1)
        kept = 1
        while kept < len(draft) and rows.coupled(mixed[kept], kept - 1) == draft.tokens[kept]:
            kept += 1
        other = sum(rows.keyed(node - 1) != int(draft.tokens[node]) for node in range(kept))
        return Outcome(list(range(kept - 1)), int(draft.tokens[kept - 1]), other)
