"""Heads that look at the token before: a block's rows do not know what stands beside them.

Both walk from the anchor to the right, over logits that were computed once for all rows.  A walk
takes many small steps, each of which needs the token of the one before: on the host and in NumPy a
step takes microseconds, where launching its products on a device would take longer than they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from .checkpoint import BlockCheckpoint

Floats = npt.NDArray[np.float32]
# (the token before, row) -> what is added to the logits (m,) of that row's candidates
Bias = Callable[[int, int], Floats]


class WalkHead:
    """Scores the candidates of a row given the token before."""

    def over(self, hidden: torch.Tensor, at: torch.Tensor) -> Bias:
        """The biases of one block: ``hidden`` (K, H) of its rows, ``at`` (K, m) the places of
        their candidates in the vocabulary that is drafted, most probable first."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class MarkovHead(WalkHead):
    """DSpark (arXiv 2607.05147): a bias of low rank, W2 W1[previous]; with a ``gate`` weight it
    depends on the row, W2 (sigmoid(G [h; W1[previous]]) * W1[previous])."""

    first: Floats  # (V, rank)
    second: torch.Tensor  # (v, rank)
    gate: torch.Tensor | None = None  # (rank, H + rank)
    gate_bias: torch.Tensor | None = None

    def over(self, hidden: torch.Tensor, at: torch.Tensor) -> Bias:
        second = _host(self.second[at])
        if self.gate is None:
            return lambda previous, row: second[row] @ self.first[previous]
        width = hidden.shape[1]
        of_row = hidden.to(self.gate.dtype) @ self.gate[:, :width].T
        raw = _host(of_row if self.gate_bias is None else of_row + self.gate_bias)
        of_token = _host(self.gate[:, width:])

        def gated(previous: int, row: int) -> Floats:
            known = self.first[previous]
            opened = known / (1 + np.exp(-(raw[row] + of_token @ known)))
            added: Floats = second[row] @ opened
            return added

        return gated


@dataclass(frozen=True, eq=False)
class SelectorHead(WalkHead):
    """DFlash 2: of a row's ``top`` most probable tokens b the one with the best
    logit(b) + <A[previous] * W h, B[b]>; all others are impossible."""

    before: Floats  # A (V, rank)
    successor: torch.Tensor  # B (v, rank)
    hidden: torch.Tensor  # W (rank, H)
    top: int = 16

    def over(self, hidden: torch.Tensor, at: torch.Tensor) -> Bias:
        of_row = _host(hidden.to(self.hidden.dtype) @ self.hidden.T)
        successor = _host(self.successor[at[:, : self.top]])
        rest = np.full(max(0, at.shape[1] - self.top), -np.inf, np.float32)
        return lambda previous, row: np.concatenate(
            [successor[row] @ (self.before[previous] * of_row[row]), rest]
        )


def _host(values: torch.Tensor) -> Floats:
    result: Floats = values.float().cpu().numpy()
    return result


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
        return SelectorHead(_host(first), second, selector["hidden_projection.weight"])
    gate, bias = markov.get("gate_proj.weight"), markov.get("gate_proj.bias")
    return MarkovHead(_host(first), second, gate, bias)
