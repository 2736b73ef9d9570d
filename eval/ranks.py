"""The harness's protocol for several processes, over `torch.distributed`."""

from __future__ import annotations

import os
from typing import Any

import torch


class Ranks:
    """What a model of the harness says of the processes it runs in; a mix-in for its class, whose
    properties ``rank`` and ``world_size`` read the two fields."""

    _rank = 0
    _world_size = 1

    def _join(self) -> None:
        """Take part in a group of processes that ``torchrun`` started."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return
        if not torch.distributed.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        self._rank = torch.distributed.get_rank()
        self._world_size = torch.distributed.get_world_size()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of all processes in a row, in order of rank."""
        if self._world_size == 1:
            return tensor
        parts = [torch.zeros_like(tensor.reshape(-1)) for _ in range(self._world_size)]
        torch.distributed.all_gather(parts, tensor.reshape(-1))
        return torch.cat(parts)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all processes, in process ``dst``; None in the others."""
        if self._world_size == 1:
            return [obj]
        result = [None] * self._world_size if self._rank == dst else None
        torch.distributed.gather_object(obj, result, dst=dst)
        return result

    def barrier(self) -> None:
        """Wait for all processes."""
        if self._world_size > 1:
            torch.distributed.barrier()
