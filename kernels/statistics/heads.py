"""What may stand at the end of a model: a weight, a linear layer, or any module.

Only a plain linear layer may be cut along the vocabulary.  Everything else (a quantised layer, a
layer with adapters or hooks) is called, because its weight alone does not say what it computes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from ..cpu import library
from ..linear import linear as product_of
from ..linear import packed_of

Head: TypeAlias = nn.Module | torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Biased:
    """A head with numbers added to the logits of some tokens: ``bias`` has (id, number) pairs."""

    head: Head
    bias: tuple[tuple[int, float], ...]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = full_logits(hidden, self.head)
        ids, numbers = zip(*self.bias, strict=True)
        index = torch.tensor(ids, device=logits.device)
        return logits.index_add(
            -1, index, logits.new_tensor(numbers).expand(*logits.shape[:-1], -1)
        )


@dataclass(frozen=True)
class Shaped:
    """A head whose logits are bent to stay within ``cap`` (None: not), then multiplied by
    ``scale``, both in float32: softcapping, and a temperature that all that is said is about."""

    head: Head
    cap: float | None = None
    scale: float = 1.0

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.shape(full_logits(hidden, self.head).to(torch.float32, copy=True))

    def shape(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (r, n) float32, changed in place."""
        kernels = library() if x.stride(-1) == 1 and x.device.type == "cpu" else None
        if self.cap is not None and kernels is not None:
            kernels.dllm_bend(
                x.data_ptr(), *x.shape, x.stride(0), self.cap, self.cap * self.scale,
                torch.get_num_threads(),
            )  # fmt: skip
        elif self.cap is not None:
            x.div_(self.cap).tanh_().mul_(self.cap * self.scale)
        elif self.scale != 1:
            x.mul_(self.scale)
        return x


def plain_linear(head: Head) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight (V, d) and bias (V,) or None, if the head is just that; None if it must be called."""
    if isinstance(head, torch.Tensor):
        return head, None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None
    if head._forward_hooks or head._forward_pre_hooks:
        return None
    if "forward" in head.__dict__ and packed_of(head) is None:
        return None
    weight = head.weight
    if type(weight) not in (nn.Parameter, torch.Tensor) or not weight.is_floating_point():
        return None  # a distributed or a quantised weight
    return weight, head.bias


def full_logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """(R, V) logits in the dtype of the head."""
    linear = plain_linear(head)
    if linear is None:
        assert callable(head)
        return head(hidden)
    weight, bias = linear
    return product_of(hidden.to(weight.dtype), weight, bias, packed_of(head))


def vocabulary(head: Head, hidden: torch.Tensor) -> int:
    """How many logits a head that must be called returns per row."""
    size = getattr(head, "out_features", None)
    return size if isinstance(size, int) else full_logits(hidden[:1], head).shape[-1]


def logprobs_of(
    hidden: torch.Tensor, head: Head, ids: torch.Tensor, token: torch.Tensor, logprob: torch.Tensor
) -> torch.Tensor:
    """(R, m) float32 clean log-probabilities of ``ids`` (R, m) for hidden rows (R, d).

    ``token`` and ``logprob`` (R,) are a proposal and its clean log-probability (before temperature
    and filters): they fix the normalisation, so that only m + 1 logits per row are computed.
    """
    wanted = torch.cat([ids, token[:, None].to(ids.device)], 1)
    bent = head if isinstance(head, Shaped) else None
    linear = plain_linear(head if bent is None else bent.head)
    if linear is None:
        logits = full_logits(hidden, head).float().gather(1, wanted)
    else:
        weight, bias = linear
        logits = torch.einsum("rd,rmd->rm", hidden.float(), weight[wanted].float())
        if bias is not None:
            logits = logits + bias[wanted].float()
        logits = logits if bent is None else bent.shape(logits)
    return logits[:, :-1] - logits[:, -1:] + logprob[:, None].to(logits.device)
