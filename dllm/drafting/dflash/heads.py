"""Heads that look at the token before: a block's rows do not know what stands beside them.

All walk from the anchor to the right, over logits that were computed once for all rows.  A walk
takes many small steps, each of which needs the token of the one before: on the host and in NumPy a
step takes microseconds, where launching its products on a device would take longer than they do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ...errors import CheckpointError
from .checkpoint import BlockCheckpoint, Tensors

Floats = npt.NDArray[np.float32]
# (what the head remembers of the path, the token before, row) -> what is added to the logits (m,)
# of that row's candidates, and what it remembers now; None: nothing yet
Bias = Callable[[Any, int, int], tuple[Floats, Any]]
# (the token before, row) -> the chance that the row's draft is accepted
Sure = Callable[[int, int], float]


class WalkHead:
    """Scores the candidates of a row given the tokens before."""

    def over(self, hidden: torch.Tensor, at: torch.Tensor) -> Bias:
        """The biases of one block: ``hidden`` (K, H) of its rows, ``at`` (K, m) the places of
        their candidates in the vocabulary that is drafted, most probable first."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class MarkovHead(WalkHead):
    """DSpark (arXiv 2607.05147): a bias of low rank, W2 W1[previous]; with a ``gate`` weight it
    depends on the row, W2 (sigmoid(G [h; W1[previous]]) * W1[previous]); with ``joint`` it is a
    recurrent network of one state."""

    first: Floats  # (V, rank)
    second: torch.Tensor  # (v, rank)
    gate: torch.Tensor | None = None  # (rank, H + rank)
    gate_bias: torch.Tensor | None = None
    joint: torch.Tensor | None = None  # (3 rank, 2 rank + H): of state, token and row
    joint_bias: torch.Tensor | None = None

    def over(self, hidden: torch.Tensor, at: torch.Tensor) -> Bias:
        second = _host(self.second[at])
        if self.joint is not None:
            return self._recurrent(self.joint, hidden, second)
        if self.gate is None:
            return lambda _, previous, row: (second[row] @ self.first[previous], None)
        width = hidden.shape[1]
        of_row = hidden.to(self.gate.dtype) @ self.gate[:, :width].T
        raw = _host(of_row if self.gate_bias is None else of_row + self.gate_bias)
        of_token = _host(self.gate[:, width:])

        def gated(_: Any, previous: int, row: int) -> tuple[Floats, None]:
            known = self.first[previous]
            opened = known * _sigmoid(raw[row] + of_token @ known)
            return second[row] @ opened, None

        return gated

    def _recurrent(self, joint: torch.Tensor, hidden: torch.Tensor, second: Floats) -> Bias:
        rank = second.shape[-1]
        of_row = hidden.to(joint.dtype) @ joint[:, 2 * rank :].T
        raw = _host(of_row if self.joint_bias is None else of_row + self.joint_bias)
        of_path = _host(joint[:, : 2 * rank])

        def step(state: Any, previous: int, row: int) -> tuple[Floats, Floats]:
            before = np.zeros(rank, np.float32) if state is None else state
            parts = raw[row] + of_path @ np.concatenate([before, self.first[previous]])
            gate, candidate, output = np.split(parts, 3)
            opened = _sigmoid(gate)
            after = opened * before + (1 - opened) * np.tanh(candidate)
            return second[row] @ np.tanh(output), after

        return step


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
        return lambda _, previous, row: (
            np.concatenate([successor[row] @ (self.before[previous] * of_row[row]), rest]), None
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class DominoHead(WalkHead):
    """Domino (arXiv 2605.29707): a GRU over the embeddings of the anchor and of what was drafted,
    P2 silu(P1 [h; state]) for all but the first ``pure`` drafts."""

    embedding: torch.Tensor  # (V, H)
    of_input: Floats  # (3 G, H): reset, update, new
    of_state: Floats  # (3 G, G)
    narrow: torch.Tensor  # P1 (E, H + G)
    wide: torch.Tensor  # P2 (v, E)
    pure: int = 0

    def over(self, hidden: torch.Tensor, at: torch.Tensor) -> Bias:
        width, size = hidden.shape[1], self.of_state.shape[1]
        of_row = _host(hidden.to(self.narrow.dtype) @ self.narrow[:, :width].T)
        of_path, wide = _host(self.narrow[:, width:]), _host(self.wide[at])

        def step(state: Any, previous: int, row: int) -> tuple[Floats, Floats]:
            before = np.zeros(size, np.float32) if state is None else state
            given = np.split(self.of_input @ _host(self.embedding[previous]), 3)
            kept = np.split(self.of_state @ before, 3)
            reset, update = (_sigmoid(given[i] + kept[i]) for i in (0, 1))
            after = (1 - update) * np.tanh(given[2] + reset * kept[2]) + update * before
            if row < self.pure:
                return np.zeros(at.shape[1], np.float32), after
            inner = of_row[row] + of_path @ after
            return wide[row] @ (inner * _sigmoid(inner)), after

        return step


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
            return float(_sigmoid(of_row[row] + more))

        return sure


def _sigmoid(x: Any) -> Any:
    return 0.5 * (1 + np.tanh(0.5 * x))  # does not overflow


def _host(values: torch.Tensor) -> Floats:
    result: Floats = values.detach().float().cpu().numpy()
    return result


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
    for part in (checkpoint.selector, checkpoint.markov, checkpoint.domino):
        if any(t.dim() != (1 if key.endswith("bias") else 2) for key, t in part.items()):
            raise CheckpointError(unfit)
    try:
        if checkpoint.selector:
            given = _float(checkpoint.selector, device)
            first, second = _tables(given, embedding, head, "predecessor_codebook",
                                    "successor_codebook")  # fmt: skip
            result: WalkHead = SelectorHead(
                _host(first), second, given["hidden_projection.weight"], variant.selector_top_k
            )
        elif checkpoint.markov:
            given = _float(checkpoint.markov, device)
            first, second = _tables(given, embedding, head, "markov_w1.weight", "markov_w2.weight")
            more = (given.get(f"{name}_proj.{part}")
                    for name in ("gate", "joint") for part in ("weight", "bias"))  # fmt: skip
            result = MarkovHead(_host(first), second, *more)
        else:
            given = _float(checkpoint.domino, device)
            result = DominoHead(
                embedding.detach(), _host(given["gru.weight_ih_l0"]),
                _host(given["gru.weight_hh_l0"]), given["proj.0.weight"], given["proj.2.weight"],
                variant.pure_draft_prefix_len,
            )  # fmt: skip
        # two steps with the first and the last candidate find every misshapen weight
        at = torch.tensor([[0, len(head) - 1]], device=device)
        step = result.over(head.new_zeros(1, head.shape[1]), at)
        _, state = step(None, len(embedding) - 1, 0)
        step(state, 0, 0)
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


def _tables(
    given: Tensors, embedding: torch.Tensor, head: torch.Tensor, first: str, second: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the token before (V, rank) and of the one that follows (v, rank)."""
    if "project_in.weight" not in given:
        return given[first], given[second]
    known = F.rms_norm(embedding.float(), embedding.shape[-1:], eps=1e-6)
    return known @ given["project_in.weight"].T, head.float() @ given["project_out.weight"]
