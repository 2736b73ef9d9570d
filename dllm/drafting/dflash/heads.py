"""Heads that look at the token before: a block's rows do not know what stands beside them.

All walk from the anchor to the right, over logits that were computed once for all rows.  A walk
takes many small steps, each of which needs the token of the one before: on the host and in NumPy a
step takes microseconds, where launching its products on a device would take longer than they do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ...core.errors import CheckpointError
from .checkpoint import BlockCheckpoint, Tensors

Floats = npt.NDArray[np.float32]
# (the token before, row) -> what is added to the logits (m,) of that row's candidates
Bias = Callable[[int, int], Floats]
# (the token before, row) -> the chance that the row's draft is accepted
Sure = Callable[[int, int], float]


@dataclass(frozen=True, eq=False)
class MarkovHead:
    """DSpark (arXiv 2607.05147): a bias of low rank, W2 W1[previous]."""

    first: Floats  # (V, rank)
    second: torch.Tensor  # (v, rank)

    def over(self, hidden: torch.Tensor, at: torch.Tensor) -> Bias:
        """The biases of one block: ``hidden`` (K, H) of its rows, ``at`` (K, m) the places of
        their candidates in the vocabulary that is drafted, most probable first."""
        second = _host(self.second[at])
        return lambda previous, row: second[row] @ self.first[previous]


@dataclass(frozen=True, eq=False)
class SelectorHead:
    """DFlash 2: of a row's ``top`` most probable tokens b the one with the best
    logit(b) + <A[previous] * W h, B[b]>; all others are impossible."""

    before: Floats  # A (V, rank)
    successor: torch.Tensor  # B (v, rank)
    hidden: torch.Tensor  # W (rank, H)
    top: int = 16

    def over(self, hidden: torch.Tensor, at: torch.Tensor) -> Bias:
        """As `MarkovHead.over`."""
        of_row = _host(hidden.to(self.hidden.dtype) @ self.hidden.T)
        successor = _host(self.successor[at[:, : self.top]])
        rest = np.full(max(0, at.shape[1] - self.top), -np.inf, np.float32)
        return lambda previous, row: np.concatenate(
            [successor[row] @ (self.before[previous] * of_row[row]), rest]
        )


WalkHead = MarkovHead | SelectorHead


@dataclass(frozen=True, eq=False)
class ConfidenceHead:
    """DSpark's: sigmoid(w [h; W1[previous]] + b), the expected share of a row's draft that the
    verifier keeps; without W1 where it was trained without."""

    weight: torch.Tensor  # (H) or (H + rank)
    bias: float
    first: Floats  # (V, rank)

    def over(self, hidden: torch.Tensor) -> Sure:
        """The chances of one block, of the ``hidden`` (K, H) of its rows."""
        width = hidden.shape[1]
        of_row = _host(hidden.to(self.weight.dtype) @ self.weight[:width]) + self.bias
        of_token = _host(self.weight[width:])

        def sure(previous: int, row: int) -> float:
            more = of_token @ self.first[previous] if len(of_token) else 0.0
            return float(0.5 * (1 + np.tanh(0.5 * (of_row[row] + more))))  # does not overflow

        return sure


def _host(values: torch.Tensor) -> Floats:
    return np.asarray(values.detach().float().cpu(), np.float32)


def head_of(
    checkpoint: BlockCheckpoint, device: torch.device, embedding: torch.Tensor, head: torch.Tensor
) -> WalkHead | None:
    """The head that a checkpoint brings, in float32; the selector where it brings several.

    Tables that are stored as projections are computed: that of the token before from the
    verifier's ``embedding`` (V, H), normed, the other from the rows (v, H) of its ``head``.
    Raises `CheckpointError` when its weights are incomplete or fit neither.
    """
    if not checkpoint.walks:
        return None
    variant = checkpoint.variant
    unfit = f"the head of {checkpoint.name} does not fit the verifier's vocabulary and width"
    for part in (checkpoint.selector, checkpoint.markov):
        if any(t.dim() != (1 if key.endswith("bias") else 2) for key, t in part.items()):
            raise CheckpointError(unfit)
    try:
        if checkpoint.selector:
            given = _float(checkpoint.selector, device)
            result: WalkHead = SelectorHead(
                _host(given["predecessor_codebook"]), given["successor_codebook"],
                given["hidden_projection.weight"], variant.selector_top_k,
            )  # fmt: skip
        else:
            given = _float(checkpoint.markov, device)
            if "project_in.weight" in given:
                known = F.rms_norm(embedding.float(), embedding.shape[-1:], eps=1e-6)
                first = known @ given["project_in.weight"].T
                second = head.float() @ given["project_out.weight"]
            else:
                first, second = given["markov_w1.weight"], given["markov_w2.weight"]
            result = MarkovHead(_host(first), second)
        # a step with the first and the last candidate finds every misshapen weight
        at = torch.tensor([[0, len(head) - 1]], device=device)
        result.over(head.new_zeros(1, head.shape[1]), at)(len(embedding) - 1, 0)
    except KeyError as error:
        raise CheckpointError(f"the head of {checkpoint.name} lacks {error.args[0]}") from error
    except (RuntimeError, ValueError, IndexError) as error:
        raise CheckpointError(unfit) from error
    return result


def confidence_of(
    checkpoint: BlockCheckpoint, device: torch.device, embedding: torch.Tensor
) -> ConfidenceHead | None:
    """DSpark's confidence head, if a checkpoint brings one.  Raises `CheckpointError` when it fits
    neither the verifier's width nor the Markov head beside it."""
    if not checkpoint.confidence:
        return None
    weight = checkpoint.confidence.get("proj.weight")
    first = checkpoint.markov.get("markov_w1.weight", torch.zeros(0, 0))
    rank = first.shape[1] if first.dim() == 2 else 0
    fits = (embedding.shape[1], embedding.shape[1] + rank)
    if weight is None or weight.dim() != 2 or len(weight) != 1 or weight.shape[1] not in fits:
        raise CheckpointError(
            f"the confidence head of {checkpoint.name} does not fit the verifier's width"
        )
    bias = checkpoint.confidence.get("proj.bias", torch.zeros(1))
    return ConfidenceHead(weight[0].to(device, torch.float32), float(bias.sum()), _host(first))


def _float(part: Tensors, device: torch.device) -> Tensors:
    return {name: t.to(device, torch.float32) for name, t in part.items()}
