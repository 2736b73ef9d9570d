"""Heads that look at the token before: a block's rows do not know what stands beside them.

Both walk from the anchor to the right, over logits that were computed once for all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .checkpoint import BlockCheckpoint


class WalkHead:
    """Scores the candidates of a row given the token before."""

    def after(
        self, previous: int, hidden: torch.Tensor, logits: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        """Logits (m,) after ``previous``, an id of the verifier.  ``hidden`` (H,) is that of the
        row, ``logits`` (m,) those of its candidates, largest first, and ``at`` (m,) their places in
        the vocabulary that is drafted."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class MarkovHead(WalkHead):
    """DSpark (arXiv 2607.05147): a bias of low rank, W2 W1[previous]; with a ``gate`` weight it
    depends on the row, W2 (sigmoid(G [h; W1[previous]]) * W1[previous])."""

    first: torch.Tensor  # (V, rank)
    second: torch.Tensor  # (v, rank)
    gate: torch.Tensor | None = None  # (rank, H + rank)
    gate_bias: torch.Tensor | None = None

    def after(
        self, previous: int, hidden: torch.Tensor, logits: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        embedded = self.first[previous]
        if self.gate is not None:
            both = torch.cat([hidden.to(embedded.dtype), embedded])
            raw = self.gate @ both
            embedded = torch.sigmoid(raw if self.gate_bias is None else raw + self.gate_bias) * (
                embedded
            )
        return logits + (self.second[at] @ embedded).to(logits.dtype)


@dataclass(frozen=True, eq=False)
class SelectorHead(WalkHead):
    """DFlash 2: of a row's ``top`` most probable tokens b the one with the best
    logit(b) + <A[previous] * W h, B[b]>; all others are impossible."""

    before: torch.Tensor  # A (V, rank)
    successor: torch.Tensor  # B (v, rank)
    hidden: torch.Tensor  # W (rank, H)
    top: int = 16

    def after(
        self, previous: int, hidden: torch.Tensor, logits: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        context = self.before[previous] * (self.hidden @ hidden.to(self.hidden.dtype))
        best = logits[: self.top] + (self.successor[at[: self.top]] @ context).to(logits.dtype)
        return torch.cat([best, torch.full_like(logits[self.top :], -torch.inf)])


def head_of(
    checkpoint: BlockCheckpoint, device: torch.device, embedding: torch.Tensor, head: torch.Tensor
) -> WalkHead | None:
    """The head that a checkpoint brings, in float32; the selector where it brings both.

    Tables that are stored as projections are computed: that of the token before from the
    verifier's ``embedding`` (V, H), normed, the other from the rows (v, H) of its ``head``.
    """
    selector, markov = (
        {name: t.to(device, torch.float32) for name, t in part.items()}
        for part in (checkpoint.selector, checkpoint.markov)
    )
    given = selector or markov
    if "project_in.weight" in given:
        known = F.rms_norm(embedding.float(), embedding.shape[-1:], eps=1e-6)
        first = known @ given["project_in.weight"].T
        second = head.float() @ given["project_out.weight"]
    elif selector:
        first, second = selector["predecessor_codebook"], selector["successor_codebook"]
    elif markov:
        first, second = markov["markov_w1.weight"], markov["markov_w2.weight"]
    else:
        return None
    if selector:
        return SelectorHead(first, second, selector["hidden_projection.weight"])
    return MarkovHead(first, second, markov.get("gate_proj.weight"), markov.get("gate_proj.bias"))
