"""What ``dtype="auto"`` stands for on the machine at hand.

On a GPU: as stored.  On a CPU that multiplies in bfloat16 natively: bfloat16, half as fast again as
float32 with AVX-512, more with AMX.  On other CPUs: float32, as half precision is emulated there
and slower, where it fits into memory.  Small networks stay as stored: they are quick
anyway, and what was recorded of them stays comparable.
"""

import logging

import psutil  # type: ignore[import-untyped, unused-ignore]
import torch

from ..kernels.cpu import library
from ..kernels.cpu.compiled import features

NATIVE = {"amx_bf16", "avx512_bf16"}  # flags of x86 processors; of others nothing was measured
SMALL = 50_000_000  # parameters
LOG = logging.getLogger("dllm")


def native_bfloat16() -> bool:
    """Whether this processor says that it multiplies bfloat16 numbers itself."""
    return bool(NATIVE & features())


def auto_dtype(name: str, stored: str, parameters: int) -> str | torch.dtype:
    """The dtype to compute in on a CPU: the ``stored`` one, or another, with a warning."""
    if parameters < SMALL or stored not in ("float32", "bfloat16", "float16"):
        return stored
    if native_bfloat16():
        if stored != "bfloat16":
            LOG.warning(
                "%s is stored in %s and computed in bfloat16, which this processor does natively; "
                "dtype='float32' asks for full precision", name, stored,
            )  # fmt: skip
        return torch.bfloat16
    if stored == "float32" or 4 * parameters > free_memory():
        return stored
    LOG.warning(
        "%s is stored in %s and computed in float32: this processor has no native bfloat16; "
        "dtype='%s' halves the memory%s", name, stored, stored,
        "" if library() is not None else " and is slower",
    )  # fmt: skip
    return torch.float32


def free_memory() -> int:
    """Bytes that a process can still have, files that may be forgotten included."""
    return int(psutil.virtual_memory().available)
