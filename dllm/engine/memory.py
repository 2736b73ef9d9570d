"""Memory of the accelerator where there is one, else of the process: its peak, and its end."""

import sys
from collections.abc import Callable
from typing import TypeVar

import psutil  # type: ignore[import-untyped, unused-ignore]
import torch

from ..core.errors import message_of

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

T = TypeVar("T")


class PeakMemory:
    """Starts measuring when it is made."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self) -> int:
        """Bytes: allocated on the device since the start, or resident in the process so far."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        if resource is None:
            info = psutil.Process().memory_info()
            return int(getattr(info, "peak_wset", info.rss))
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = message_of(error)
    return "not enough memory" in text or "can't allocate memory" in text


def unless_out_of_memory(take: Callable[[], T | None]) -> T | None:
    """What ``take`` gets; None where memory does not suffice for it."""
    try:
        return take()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None
