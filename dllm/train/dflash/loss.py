"""Losses of block drafters: cross-entropy under the verifier's frozen head, weighted by place.

``decay``: the weights of DFlash (arXiv 2602.06036), exp(-(k - 1) / gamma) for the k-th draft.
``dpace``: D-PACE (arXiv 2605.18810), the probability that a draft is reached at all and what
depends on it: with s = (1 - a) q + a for the label's probability q, the sum over m >= k of the
products of s_1 .. s_m.
"""

from typing import Any

import torch


class FrozenHeadLoss(torch.autograd.Function):
    """Cross-entropy per row under a head that is not trained.

    The gradient of a row's own loss is computed with the loss, so that the logits, by far the
    largest tensor of a step, live for one pass only.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor,
        teacher: torch.Tensor | None, soft: float, rows: int, factor: float = 1.0,
        cap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Losses (n,) and probabilities (n,) of ``labels``, which index rows of ``head`` (V, H).

        ``teacher`` (n, H): hidden states from which the verifier predicted the labels; ``soft`` is
        the share of its distribution in the target, and ``factor`` and ``cap`` are what it does to
        the logits of its head.  ``rows`` are computed at a time.
        """
        losses, probabilities, gradients = [], [], []
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            log_q = (hidden[part].to(head.dtype) @ head.T).float().log_softmax(-1)
            picked = log_q.gather(1, labels[part, None]).squeeze(1)
            loss, gradient = -picked, log_q.exp()
            probabilities.append(picked.exp())
            target = 0.0
            if teacher is not None and soft > 0:
                said = (teacher[part].to(head.dtype) @ head.T).float() * factor
                p = (said if cap is None else cap * torch.tanh(said / cap)).softmax(-1)
                loss = (1 - soft) * loss - soft * (p * log_q).sum(-1)
                gradient -= soft * p
                target = soft
            ones = torch.full_like(picked, -(1.0 - target))
            gradient.scatter_add_(1, labels[part, None], ones[:, None])
            gradients.append(gradient.to(head.dtype) @ head)
            losses.append(loss)
        ctx.save_for_backward(torch.cat(gradients))
        ctx.dtype = hidden.dtype
        probability = torch.cat(probabilities)
        ctx.mark_non_differentiable(probability)
        return torch.cat(losses), probability

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return (grads[0][:, None] * gradient).to(ctx.dtype), *[None] * 7


def decay_weights(counted: torch.Tensor, gamma: float) -> torch.Tensor:
    """Weights (N, K) of DFlash; 0 where ``counted`` (N, K) is false."""
    places = torch.arange(counted.shape[1], device=counted.device)
    return torch.exp(-places / gamma) * counted


def dpace_weights(q: torch.Tensor, counted: torch.Tensor, floor: float = 0.5) -> torch.Tensor:
    """Weights (N, K) of D-PACE from the labels' probabilities ``q`` (N, K)."""
    reached = ((1 - floor) * q + floor).cumprod(1) * counted
    return reached.flip(1).cumsum(1).flip(1).detach() * counted


def sampled_rows(
    labels: torch.Tensor, common: torch.Tensor, size: int, extra: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the head for one step, and ``labels`` as indices into them.

    The ``common`` tokens, every label, and ``extra`` random ones that stand for the rest of the
    vocabulary of ``size``: no label is ever missing, and rare tokens learn to be rare.
    """
    others = torch.randint(size, (extra,), generator=generator).to(labels.device)
    rows = torch.cat([common, others, labels]).unique()  # type: ignore[no-untyped-call]
    return rows, torch.searchsorted(rows, labels)
