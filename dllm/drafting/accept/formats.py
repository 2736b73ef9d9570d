"""Answers with a form from an autoregressive verifier: its logits without the tokens that leave it.

A draft that leaves the form is one that the verifier gives no probability, so drafts need no check
of their own, and the text is that of decoding plainly with the same form.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...formats import Format


@dataclass(frozen=True)
class FormatProcessor:
    """A logits processor that leaves the tokens from which a text of the form can be completed.

    ``start``: tokens of the prompt; ``limit``: of prompt and answer together.
    """

    form: Format
    start: int
    limit: int

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        automaton, written = self.form.automaton, ids[0, self.start :].cpu().numpy()
        assert self.form.start is not None
        state = automaton.run(self.form.start, written)
        if state < 0:  # behind a drafted token that is refused already
            return scores
        follow, left = automaton.next[state], self.limit - self.start - len(written) - 1
        allowed = np.append((follow >= 0) & (automaton.need[follow] <= left), False)
        keep = torch.from_numpy(allowed[automaton.of]).to(scores.device)
        size = scores.shape[1]
        keep = torch.nn.functional.pad(keep, (0, max(0, size - len(keep))))[:size]
        return scores.masked_fill(~keep, -torch.inf)
