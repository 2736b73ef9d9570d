"""Heads that look at the token before, trained beside a block drafter.

DSpark's Markov head (arXiv 2607.05147) and DFlash 2's selector learn two tables of the size of the
vocabulary, one for the token before and one for the token that follows.  Here the tables are
projections of what the verifier has learnt already: the first of its embedding, the second of its
head.  A small run can learn these, they take no room in a checkpoint, and adding to the logits is
the same as adding to the hidden state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-6
TOP = 16  # candidates of a selector


class WalkProjection(nn.Module):
    """Corrects hidden states by the token before; ``top``: of how many of the most probable tokens
    the corrected logits choose, None: of all."""

    top: int | None = None

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.project_in = nn.Linear(width, rank, bias=False)
        self.project_out = nn.Linear(rank, width, bias=False)
        nn.init.normal_(self.project_in.weight, std=width**-0.5)
        nn.init.normal_(self.project_out.weight, std=1e-3)

    def before(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """The token before, (..., rank), of its embedding (..., H)."""
        known = F.rms_norm(previous.to(hidden.dtype), hidden.shape[-1:], eps=EPS)
        projected: torch.Tensor = self.project_in(known)
        return projected

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., H) that know the token before, by its embedding (..., H)."""
        raise NotImplementedError


class MarkovProjection(WalkProjection):
    """DSpark's head without a gate, h + W2 a for the token before a."""

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.project_out(self.before(hidden, previous))
        return hidden + out


class SelectorProjection(WalkProjection):
    """DFlash 2's selector, h + B (a * W h) for the token before a, among `TOP` candidates."""

    top = TOP

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(width, rank)
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        nn.init.normal_(self.hidden_projection.weight, std=width**-0.5)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        chosen = self.before(hidden, previous) * self.hidden_projection(hidden)
        out: torch.Tensor = self.project_out(chosen)
        return hidden + out


def choice_loss(
    unary: torch.Tensor, corrected: torch.Tensor, head: torch.Tensor, labels: torch.Tensor,
    top: int, chunk: int,
) -> torch.Tensor:  # fmt: skip
    """Cross-entropy (n,) of choosing ``labels`` (n,), rows of ``head`` (V, H), among the ``top``
    most probable rows under ``unary`` (n, H), by their logits under ``corrected`` (n, H).

    Where the label is not among them it takes the place of the last one.
    """
    losses = []
    for first in range(0, len(unary), chunk):
        part = slice(first, first + chunk)
        with torch.no_grad():
            at = (unary[part].to(head.dtype) @ head.T).topk(min(top, len(head))).indices
            missing = ~(at == labels[part, None]).any(1)
            at[:, -1] = torch.where(missing, labels[part], at[:, -1])
            place = (at == labels[part, None]).long().argmax(1)
        rows = corrected[part].to(head.dtype)
        logits = torch.einsum("nh,nkh->nk", rows, head[at]).float()
        losses.append(F.cross_entropy(logits, place, reduction="none"))
    return torch.cat(losses)
