"""Memory that is mapped from a file, given back to the system.

A checkpoint is mapped, not read: its pages come into memory when they are touched, and can be
dropped at any time, as the file has them.  The system does so when memory runs short; until then
they count as memory of the process.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect
from pathlib import Path

import torch

MAPS = Path("/proc/self/maps")  # Linux only
PAGEOUT = 21  # advice of madvise, since Linux 5.4: pages that were written stay, the others go
LEAST = 1 << 18  # bytes from which looking it up pays
_RANGES: list[tuple[int, int, bool]] = []


def release(tensor: torch.Tensor) -> bool:
    """Drop the pages of a dense ``tensor`` that is mapped; its numbers stay, and are read from the
    file when somebody wants them.  False: it is not mapped, or the system keeps it."""
    if not is_mapped(tensor):
        return False
    first, size = tensor.data_ptr(), tensor.nbytes
    inner = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = (first + size - inner) // mmap.PAGESIZE
    advise = ctypes.CDLL(None).madvise
    length = ctypes.c_size_t(pages * mmap.PAGESIZE)
    return bool(advise(ctypes.c_void_p(inner), length, PAGEOUT) == 0)


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether a dense ``tensor`` of at least `LEAST` bytes lies in a mapped file."""
    first, size = tensor.data_ptr(), tensor.nbytes
    if size < LEAST or tensor.device.type != "cpu":
        return False
    last = first + size
    for _ in range(2):
        at = bisect(_RANGES, (first, 2**64)) - 1
        if at >= 0 and last <= _RANGES[at][1]:
            return _RANGES[at][2]
        _RANGES[:] = _read()  # memory that is newer than the last look
    return False


def _read() -> list[tuple[int, int, bool]]:
    """All ranges of addresses, and whether a file lies behind them."""
    try:
        lines = MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for first, *_, last in (line.split(maxsplit=5) for line in lines):
        low, _, high = first.partition("-")
        found.append((int(low, 16), int(high, 16), last.startswith("/")))
    return found
