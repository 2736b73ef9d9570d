"""The processes of one run, as `accelerate launch` and torchrun start them.

A run is the same on any number of processes: they share batches, and the first one writes.
"""

import os
from collections.abc import Iterable, Iterator
from datetime import timedelta

from accelerate import PartialState
from accelerate.utils import InitProcessGroupKwargs

from ..core.errors import ConfigError

PATIENCE = timedelta(days=7)  # that others wait while the first one decodes answers


def world() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def own_device(device: str) -> str:
    """The GPU of this process where ``device`` is any: "cuda:1" of the second one of a machine."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device


def shared(batches: int) -> int:
    """The batches per step of each process.  Raises `ConfigError` where they cannot be shared."""
    if batches % world():
        raise ConfigError(
            f"{world()} processes cannot share {batches} batches per step: make --accumulate a "
            f"multiple of {world()}"
        )
    return batches // world()


def by_the_first(work: Iterable[int], device: str) -> Iterator[int]:
    """What the first process yields while it does ``work``; the others wait until it is done."""
    if world() == 1:
        yield from work
        return
    group = InitProcessGroupKwargs(timeout=PATIENCE).to_kwargs()
    state = PartialState(cpu=device == "cpu", **group)
    if is_first():
        yield from work
    state.wait_for_everyone()
