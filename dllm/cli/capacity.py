"""Tokens per second of a model on this processor, predicted from products of its sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..models.checkpoint import Checkpoint

PER_STEP = 4  # tokens decided per forward, as `--caches` assumes
BLOCK = 32  # positions that a cached step computes


def tokens_per_second(
    checkpoint: Checkpoint, kind: str, context: int, prompt: int = 512, new: int = 256
) -> tuple[float, float] | None:
    """Of one row on this processor without a cache and with `dual`, predicted from products
    measured in ``kind``: a dtype, "int8" or "int4".  None for networks of another build."""
    import torch

    from ..eval.cost import Rates, Shape, step_cost
    from ..models.linears import room_for
    from ..models.reading import family_of, native_config

    try:
        shape = Shape.of(native_config(checkpoint, family_of(checkpoint))[0])
    except AttributeError:  # sizes of another kind
        return None
    if 0 < context < prompt + new:  # in proportion
        new = max(4, context * new // (prompt + new))
        prompt = context - new
    bits = {"int8": 8, "int4": 4}.get(kind, 0)
    dtype = torch.bfloat16 if bits else getattr(torch, kind)
    copy = room_for(shape.parameters * dtype.itemsize)
    rates = Rates.measure(shape, torch.device("cpu"), dtype, bits, copy)
    length, block = prompt + new, min(BLOCK, new)
    full = rates.seconds(step_cost(shape, length, length, block))
    part = rates.seconds(step_cost(shape, block, length, block))
    steps, blocks = max(1, new // PER_STEP), max(1, -(-new // BLOCK))
    return new / (steps * full), new / (blocks * full + max(0, steps - blocks) * part)
