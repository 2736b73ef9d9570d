"""A Markov head for a block drafter (DSpark, arXiv 2607.05147), trained beside it.

DSpark learns two tables of the size of the vocabulary, W1 and W2, and adds W2 (gate * W1[previous])
to the logits.  Here the tables are projections of what the verifier has learnt already: W1 of its
embedding, W2 of its head.  A small run can learn these, they take no room in a checkpoint, and
adding to the logits is the same as adding to the hidden state.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-6


class MarkovProjection(nn.Module):
    """Corrects hidden states (..., H) by the embeddings (..., H) of the tokens before."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.project_in = nn.Linear(width, rank, bias=False)
        self.project_out = nn.Linear(rank, width, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank)
        nn.init.normal_(self.project_in.weight, std=width**-0.5)
        nn.init.normal_(self.project_out.weight, std=1e-3)
        nn.init.zeros_(self.gate_proj.weight)

    def forward(self, hidden: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Hidden states that know the token before; gates as in DSpark."""
        embedded = self.project_in(
            F.rms_norm(previous.to(hidden.dtype), hidden.shape[-1:], eps=EPS)
        )
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1)))
        out: torch.Tensor = self.project_out(gate * embedded)
        return hidden + out
