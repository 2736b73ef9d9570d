"""The head that looks at the token before, trained beside a block drafter.

DSpark's Markov head (arXiv 2607.05147) learns two tables of the size of the vocabulary, one for the
token before and one for the token that follows.  Here the tables are projections of what the
verifier has learnt already: the first of its embedding, the second of its head.  A small run can
learn these, they take no room in a checkpoint, and adding to the logits is the same as adding to
the hidden state.
"""

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-6


class MarkovProjection(nn.Module):
    """DSpark's head without a gate, h + W2 W1 a for the token before a."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.project_in = nn.Linear(width, rank, bias=False)
        self.project_out = nn.Linear(rank, width, bias=False)
        nn.init.normal_(self.project_in.weight, std=width**-0.5)
        nn.init.normal_(self.project_out.weight, std=1e-3)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., H) that know the token before, by its embedding (..., H)."""
        known = F.rms_norm(previous.to(hidden.dtype), hidden.shape[-1:], eps=EPS)
        out: torch.Tensor = self.project_out(self.project_in(known))
        return hidden + out
