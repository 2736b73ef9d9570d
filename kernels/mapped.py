"""Memory that is mapped from a file, given back to the system.

A checkpoint is mapped, not read: its pages come into memory when they are touched, and can be
dropped at any time, as the file has them.  The system does so when memory runs short; until then
they count as memory of the process.
"""

import ctypes
import mmap
from pathlib import Path

import torch

MAPS = Path("/proc/self/maps")  # Linux only
PAGEOUT = 21  # advice of madvise, since Linux 5.4: pages that were written stay, the others go
LEAST = 1 << 18  # bytes from which looking it up pays


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
    try:
        lines = MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in lines:  # about a millisecond; not kept, since addresses are used again
        addresses, *_, name = line.split(maxsplit=5)
        low, _, high = addresses.partition("-")
        if int(low, 16) <= first and first + size <= int(high, 16):
            return name.startswith("/")
    return False
