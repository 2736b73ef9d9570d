"""What ``dtype="auto"`` stands for on the machine at hand.

On a GPU: as stored.  On a CPU that multiplies in bfloat16 natively: bfloat16, half as fast again as
float32 with AVX-512, more with AMX.  On other CPUs: float32, as half precision is emulated there
and slower, where it fits into memory.  Small networks stay as stored: they are quick
anyway, and what was recorded of them stays comparable.
"""

import logging
import os
from functools import cache
from pathlib import Path

import torch

NATIVE = {"amx_bf16", "avx512_bf16"}  # flags of x86 processors; of others nothing was measured
SMALL = 50_000_000  # parameters
CPUINFO, MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")
LOG = logging.getLogger("dllm")


@cache
def native_bfloat16() -> bool:
    """Whether this processor says that it multiplies bfloat16 numbers itself."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux: nothing is assumed
        return False
    flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    return bool(NATIVE & set(flags.split()))


def auto_dtype(name: str, stored: str | None, parameters: int) -> str | torch.dtype:
    """The dtype of a checkpoint on a CPU; "auto" stands for as stored.  What differs is logged."""
    stored = (stored or "float32").removeprefix("torch.")
    if parameters < SMALL or stored not in ("float32", "bfloat16", "float16"):
        return "auto"
    if native_bfloat16():
        if stored != "bfloat16":
            LOG.warning(
                "%s is stored in %s and computed in bfloat16, which this processor does natively; "
                "dtype='float32' asks for full precision", name, stored,
            )  # fmt: skip
        return torch.bfloat16
    if stored == "float32":
        return "auto"
    if 4 * parameters > free_memory():
        return "auto"
    LOG.warning(
        "%s is stored in %s and computed in float32: this processor has no native bfloat16; "
        "dtype='%s' halves the memory and is slower", name, stored, stored,
    )  # fmt: skip
    return torch.float32


def free_memory() -> int:
    """Bytes that a process can still have, files that may be forgotten included; unbounded where
    the system does not say."""
    try:
        for line in MEMINFO.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2**62
