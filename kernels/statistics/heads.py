"""What may stand at the end of a model: a weight, a linear layer, a share of one, or any module.

Only a plain linear layer may be cut along the vocabulary.  Everything else (a quantised layer, a
layer with adapters or hooks) is called, because its weight alone does not say what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import nn

from ..linear import linear as product_of
from ..linear import packed_of

Head: TypeAlias = nn.Module | torch.Tensor | Callable[[torch.Tensor], torch.Tensor]

# what splits a layer may also replace its forward, by one that gathers the logits
SPLITS = "transformers.distributed.tensor_parallel"


@dataclass(frozen=True)
class Share:
    """This process's share of a linear head that is split along the vocabulary.

    ``weight`` (n, d) and ``bias`` (n,) or None are rows of the whole; ``sizes`` are the lengths
    of all shares, ascending in ids with the rank in ``group`` (None: all processes); ``rank`` is
    that of this process.  Called like any head, by all processes alike, it gathers all logits.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None

    @property
    def first_id(self) -> int:
        return sum(self.sizes[: self.rank])

    @property
    def out_features(self) -> int:
        return sum(self.sizes)

    def cut(self, vocab_size: int | None) -> Share:
        """The same without the ids from ``vocab_size`` on."""
        if vocab_size is None or vocab_size >= self.out_features:
            return self
        starts = (sum(self.sizes[:i]) for i in range(len(self.sizes)))
        sizes = [max(0, min(n, vocab_size - at)) for n, at in zip(self.sizes, starts, strict=True)]
        own = sizes[self.rank]
        bias = None if self.bias is None else self.bias[:own]
        return replace(self, weight=self.weight[:own], bias=bias, sizes=tuple(sizes))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        own = nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        own = nn.functional.pad(own, (0, max(self.sizes) - own.shape[-1])).contiguous()
        parts = [torch.empty_like(own) for _ in self.sizes]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat([part[..., :n] for part, n in zip(parts, self.sizes, strict=True)], -1)


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
        return self.shape(full_logits(hidden, self.head).float().clone())

    def shape(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` float32, changed in place."""
        if self.cap is not None:
            x.div_(self.cap).tanh_().mul_(self.cap * self.scale)
        elif self.scale != 1:
            x.mul_(self.scale)
        return x


def plain_linear(head: Head) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weight (V, d) and bias (V,) or None, if the head is just that; None if it must be called."""
    if isinstance(head, torch.Tensor):
        return head, None
    if not _is_linear(head) or ("forward" in head.__dict__ and packed_of(head) is None):
        return None
    weight = head.weight
    if type(weight) not in (nn.Parameter, torch.Tensor) or not weight.is_floating_point():
        return None  # a distributed or a quantised weight
    return weight, head.bias


def split_linear(head: Head) -> Share | None:
    """This process's share, if the head is one or a linear layer that tensor parallelism split
    along the vocabulary and nothing else changed."""
    if isinstance(head, Share):
        return head
    if not _is_linear(head) or type(head.weight) is nn.Parameter:  # asked in every step
        return None
    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.tensor import DTensor, Shard

    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor) or tuple(weight.placements) != (Shard(0),):
        return None
    forward = head.__dict__.get("forward")
    if forward is not None and getattr(forward, "__module__", "") != SPLITS:
        return None
    size, count, rank = len(weight), weight.device_mesh.size(), weight.device_mesh.get_local_rank()
    step = -(-size // count)
    sizes = tuple(max(0, min(step, size - i * step)) for i in range(count))
    own, own_bias = weight.to_local(), bias.to_local() if isinstance(bias, DTensor) else bias
    if len(own) != sizes[rank] or (own_bias is not None and len(own_bias) != sizes[rank]):
        return None
    return Share(own, own_bias, sizes, rank, weight.device_mesh.get_group())


def _is_linear(head: Head) -> TypeGuard[nn.Linear]:
    """Whether ``head`` is a linear layer by its class, and no hooks look on."""
    return (
        isinstance(head, nn.Linear)
        and type(head).forward is nn.Linear.forward
        and not head._forward_hooks
        and not head._forward_pre_hooks
    )


def full_logits(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """(R, V) logits in the dtype of the head."""
    linear = plain_linear(head)
    if linear is None:
        assert callable(head)
        logits: torch.Tensor = head(hidden)
        return logits
    weight, bias = linear
    return product_of(hidden.to(weight.dtype), weight, bias, packed_of(head))


def vocabulary(head: Head, hidden: torch.Tensor) -> int:
    """How many logits a head that must be called returns per row."""
    size = getattr(head, "out_features", None)
    return size if isinstance(size, int) else full_logits(hidden[:1], head).shape[-1]
