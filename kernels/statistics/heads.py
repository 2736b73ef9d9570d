"""What may stand at the end of a model: a weight, a linear layer, or any module.

Only a plain linear layer may be cut along the vocabulary.  Everything else (a quantised layer, a
layer with adapters or hooks) is called, because its weight alone does not say what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

Head: TypeAlias = nn.Module | torch.Tensor | Callable[[torch.Tensor], torch.Tensor]


def plain_linear(head: Head) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight (V, d) and bias (V,) or None, if the head is just that; None if it must be called."""
    if isinstance(head, torch.Tensor):
        return head, None
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return None
    if "forward" in head.__dict__ or head._forward_hooks or head._forward_pre_hooks:
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
        logits: torch.Tensor = head(hidden)
        return logits
    weight, bias = linear
    return nn.functional.linear(hidden.to(weight.dtype), weight, bias)


def vocabulary(head: Head, hidden: torch.Tensor) -> int:
    """How many logits a head that must be called returns per row."""
    size = getattr(head, "out_features", None)
    return size if isinstance(size, int) else full_logits(hidden[:1], head).shape[-1]
