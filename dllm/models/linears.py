"""The linear layers and experts of a network on a CPU, multiplied by oneDNN or compiled kernels
(`dllm.kernels.linear`, `dllm.kernels.experts`).

Their weights are laid out a second time in the order that oneDNN wants, when they are first used
without gradients; the network's own stay as they are, for ``state_dict``, training and adapters:
in the checkpoint's file, from which they are mapped, or in memory a second time where they were
cast or put together, as experts are that a file holds apart.  Where the copy would take too much
of the free memory (`room_for`) there is none: the same numbers, more slowly for few rows.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels import experts
from ..kernels.linear import Packed, check_packed, pack, suits
from .forwards import CACHE
from .precision import free_memory
from .quantisation import are_experts, matrices


def pack_linears(hf: PreTrainedModel) -> None:
    """Let the plain linear layers and experts of ``hf`` multiply by oneDNN.  Changes them in place.

    Layers of other classes (quantised, with adapters) or with wrapped forwards are left alone.
    """
    layers = [
        module
        for module in hf.modules()
        if type(module) is nn.Linear and "forward" not in module.__dict__ and suits(module.weight)
    ]
    size = sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)
    copy = bool(layers) and room_for(size)
    for layer in layers:
        pack(layer, copy)
    mixed: list[Any] = [m for m in hf.modules() if are_experts(m) and "forward" not in m.__dict__]
    size += sum(weight.nbytes for module in mixed for weight in matrices(module))
    copy = bool(mixed) and room_for(size)
    for module in mixed:
        first, second = Packed(copy, "gate_up_proj"), Packed(copy, "down_proj")
        module.forward = partial(experts.forward, module, first, second)
    if layers:
        hf.register_forward_pre_hook(_check_copies, with_kwargs=True)


def _check_copies(hf: nn.Module, _: Any, given: dict[str, Any]) -> None:
    """Before a whole forward, forget copies of weights that have changed since: merging an adapter
    does so where PyTorch does not notice.  Decoding with a cache has checked when it began."""
    stepping = given.get(CACHE) is not None
    if not (stepping or torch.is_grad_enabled() or torch.compiler.is_compiling()):
        check_packed(hf)


def room_for(size: int) -> bool:
    """Whether to make a copy of so many bytes: it is to take at most half of the free memory.

    Also where the original is mapped and can go: 15 GB of copies on a machine of 24 GB took 53 s
    until the first forward in place of 21, and 16 s in place of 9 for four with a cache.
    """
    return size <= free_memory() * 0.5
