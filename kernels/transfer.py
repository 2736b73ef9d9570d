"""Tensors on their way to a device and back: one copy each way, whatever there is to carry."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

EVEN = 8  # bytes of which every tensor begins at a multiple, so that all dtypes can be viewed


def tensor(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``; no copy on a CPU."""
    result = torch.from_numpy(np.ascontiguousarray(array))
    return result if device.type == "cpu" else result.to(device, non_blocking=True)


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """``arrays`` of any shape and dtype on ``device``, by one copy that is cut there; from pinned
    memory where that is a GPU, so that the host does not wait for it.  No copy on a CPU."""
    there = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    if device.type == "cpu" or not there:  # they may stay where they are
        return there
    flat = joined(there).pin_memory() if device.type == "cuda" else joined(there)
    return cut(flat.to(device, non_blocking=True), there)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors of one device, each from a multiple of `EVEN` on."""
    parts, gap = list[torch.Tensor](), tensors[0].new_empty(EVEN, dtype=torch.uint8)
    for x in tensors:
        # a dimension of one entry, or none, may have any stride: `view` would not take it
        flat = x.contiguous().as_strided((x.numel(),), (1,))
        parts += [flat.view(torch.uint8), gap[: -x.nbytes % EVEN]]
    return torch.cat(parts)


def cut(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Undo `joined`, given tensors of the same shapes and dtypes: views."""
    result, at = list[torch.Tensor](), 0
    for x in like:
        result.append(flat[at : at + x.nbytes].view(x.dtype).view(x.shape))
        at += -(-x.nbytes // EVEN) * EVEN
    return result


class ToHost:
    """Tensors on their way to the host in one copy, waited for when read; at once on a CPU."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors: Sequence[torch.Tensor] = tensors
        self._done: torch.cuda.Event | None = None
        if not tensors or tensors[0].device.type == "cpu":
            return
        flat = joined(tensors)
        if flat.device.type == "cuda":  # to memory that the device can write to by itself
            there = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            there.copy_(flat, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(flat.device))
        else:
            there = flat.cpu()
        self._tensors = cut(there, tensors)

    def arrays(self) -> list[Any]:
        if self._done is not None:
            self._done.synchronize()
        return list(map(torch.Tensor.numpy, self._tensors))
