"""Feedback for drafters in engines that report nothing but the text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.canvas import IntArray
from ..base import EMPTY, ROOT, Budget, Draft, Drafting, Feedback


@dataclass
class TextFollower:
    """A drafter on one sequence; what became of a draft is read off the text that came next.

    The verifier's scores are not known here: `Feedback.scores` is None.
    """

    drafting: Drafting
    tokens: IntArray
    draft: Draft = EMPTY

    def propose(self, tokens: IntArray, budget: Budget) -> Draft:
        """A draft after ``tokens``, the whole text by now."""
        self.follow(tokens)
        self.draft = self.drafting.propose(tokens, budget)
        return self.draft

    def follow(self, tokens: IntArray) -> None:
        """Tell the drafter about everything in ``tokens`` that is new."""
        emitted: list[int] = tokens[len(self.tokens) :].tolist()
        if not emitted:
            return
        path: list[int] = []
        for token in emitted[:-1]:  # the last one is the verifier's own
            below = self.draft.children(path[-1] if path else ROOT)
            same = [node for node in below if self.draft.tokens[node] == token]
            if not same:
                break
            path.append(same[0])
        fed = np.concatenate([self.tokens[-1:], self.draft.tokens])
        self.drafting.observe(Feedback(self.draft, path, emitted, fed, None))
        self.tokens, self.draft = tokens.copy(), EMPTY

    def close(self) -> None:
        self.drafting.close()
