"""Keyed noise: random numbers as a pure function of (seed, stream, position, step, token).

A counter-based generator (Philox4x32-10) makes a number depend on its own name only, not on how
many were drawn before, on tiling, on the batch or on the device.  ``stream`` (< 2**32) tells rows
and purposes apart.  Two shapes of the same thing:

- `bits`, `uniform`, `gumbel` take five broadcastable integers and return NumPy arrays;
- `row_bits`, `row_gumbel` take ``keys`` (R, 4) int64 and a range of token ids and
  return (R, high - low) tensors on the device of the keys; `row_gumbel_at` takes any ids.

Bits and uniform numbers are equal everywhere; Gumbel noise up to the last bits of a logarithm.
"""

from collections.abc import Sequence

import torch as _torch

from .naive import bits, gumbel, uniform
from .torch import bits as row_bits
from .torch import gumbel as row_gumbel
from .torch import gumbel_at as row_gumbel_at

__all__ = ["bits", "gumbel", "pack_keys", "row_bits", "row_gumbel", "row_gumbel_at", "uniform"]


def pack_keys(
    rows: Sequence[tuple[int, int, int, int]], device: _torch.device | str = "cpu"
) -> _torch.Tensor:
    """(seed, stream, position, step) of every row as (R, 4) int64; seeds count modulo 2**64."""
    wrapped = [((s + 2**63) % 2**64 - 2**63, *rest) for s, *rest in rows]
    return _torch.tensor(wrapped, dtype=_torch.int64, device=device).view(-1, 4)
