"""``dllm doctor --serve``: rows that fit, the floor of a step, the ceiling of tokens per second.

Formulas: a step computes positions at the rate of matrix products of the model's sizes, measured
on this device or taken from a card's data sheet; keys and values of a row over its canvas take
memory beside the weights.  Nothing of a server is in it: no HTTP, no queue, no host; no server is
faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from ..eval.cost import Rates, Shape
    from ..models.checkpoint import Checkpoint

PER_STEP = 4  # tokens decided per forward, as `--caches` assumes
ROWS = (1, 2, 4, 8, 16, 32, 64)
BLOCK = 32  # positions that a cached step computes
SHARE = 0.9  # of the free memory that keys and values may take


@dataclass(frozen=True)
class Card:
    """What a data sheet says: dense bfloat16 operations per second with sums in float32, bytes per
    second and bytes of its memory."""

    operations: float
    bandwidth: float
    memory: float

    def rates(self, shape: Shape) -> Rates:
        """Of products with bfloat16 matrices of ``shape``: bound by reading them, or by arithmetic
        from ``operations / bandwidth`` rows on."""
        from ..eval.cost import ROWS as MEASURED
        from ..eval.cost import Rates

        size = shape.hidden * shape.intermediate
        rows = sorted({*MEASURED, round(self.operations / self.bandwidth)})
        seconds = [max(2 * n * size / self.operations, 2 * size / self.bandwidth) for n in rows]
        rates = [2 * n * size / s for n, s in zip(rows, seconds, strict=True)]
        return Rates(tuple(rows), tuple(rates))


CARDS = {
    "L4": Card(121e12, 0.300e12, 24e9),
    "RTX4090": Card(165e12, 1.008e12, 24e9),
    "L40S": Card(362e12, 0.864e12, 48e9),
    "A100": Card(312e12, 2.039e12, 80e9),
    "H100": Card(989e12, 3.35e12, 80e9),
    "H200": Card(989e12, 4.8e12, 141e9),
    "B200": Card(2250e12, 8.0e12, 180e9),
    "MI300X": Card(1307e12, 5.3e12, 192e9),
}


def tokens_per_second(
    checkpoint: Checkpoint, kind: str, context: int, prompt: int = 512, new: int = 256
) -> tuple[float, float] | None:
    """Of one row on this processor without a cache and with `dual`, predicted from products
    measured in ``kind``: a dtype, "int8" or "int4".  None for networks of another build."""
    import torch

    from ..eval.cost import Rates, Shape, step_cost
    from ..eval.gains import within
    from ..models.linears import room_for
    from ..models.reading import family_of, native_config

    try:
        shape = Shape.of(native_config(checkpoint, family_of(checkpoint))[0])
    except AttributeError:  # sizes of another kind
        return None
    prompt, new = within(context or prompt + new, prompt, new)
    bits = {"int8": 8, "int4": 4}.get(kind, 0)
    dtype = torch.bfloat16 if bits else getattr(torch, kind)
    copy = room_for(shape.parameters * dtype.itemsize)
    rates = Rates.measure(shape, torch.device("cpu"), dtype, bits, copy)
    length, block = prompt + new, min(BLOCK, new)
    full = rates.seconds(step_cost(shape, length, length, block))
    part = rates.seconds(step_cost(shape, block, length, block))
    steps, blocks = max(1, new // PER_STEP), max(1, -(-new // BLOCK))
    return new / (steps * full), new / (blocks * full + max(0, steps - blocks) * part)


def table(model: str, prompt: int, new: int, free: int, on: str | None = None) -> list[str]:
    """Lines of text: what fits, then a line per number of rows.

    ``prompt``, ``new``: tokens of a request; ``free``: bytes.  ``on``: one of `CARDS`, whose memory
    and rates count instead of this device's.  Raises `ConfigError` for models that do not decode by
    diffusion, and for other cards.
    """
    import torch

    from ..eval.cost import Rates, Shape, step_cost
    from ..models.checkpoint import open_checkpoint
    from ..models.footprint import WIDTHS, footprint
    from ..models.reading import family_of, native_config

    if on is not None and on not in CARDS:
        raise UnknownNameError("card", on, CARDS)
    checkpoint = open_checkpoint(model)
    family = family_of(checkpoint)
    if not family.diffusion:
        raise ConfigError(f"{checkpoint.name} is autoregressive: serve it with what is made for it")
    needs = footprint(checkpoint)
    config, _ = native_config(checkpoint, family)
    length = prompt + new
    if needs.context and length > needs.context:
        raise ConfigError(
            f"{prompt} + {new} tokens are more than the {needs.context} positions of "
            f"{checkpoint.name}: lower --prompt-tokens or --new-tokens"
        )
    shape = Shape.of(config)
    if on is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype, where = needs.dtype, str(device)
        rates = Rates.measure(shape, device, getattr(torch, dtype))
    else:
        dtype, where, rates, free = "bfloat16", on, CARDS[on].rates(shape), int(CARDS[on].memory)
    narrower = WIDTHS[dtype] / WIDTHS.get(needs.dtype, 2)
    row = int(needs.keys_values * narrower) * length // max(1, needs.context)
    fit = max(0, int((free * SHARE - needs.weights * narrower) // max(1, row)))
    lines = [
        f"{checkpoint.name} in {dtype} on {where}: prompt {prompt}, {new} new tokens, "
        f"{PER_STEP} decided per step",
        f"rows that fit: {fit:,} with keys and values ({row / 2**20:.1f} MiB each), of "
        f"{free / 2**30:.1f} GiB",
        f"{'rows':>5}  {'cache none: step':>17}  {'tokens/s':>9}  {'cache dual: step':>17}  "
        f"{'tokens/s':>9}",
    ]
    steps, blocks = max(1, new // PER_STEP), max(1, -(-new // BLOCK))
    for rows in ROWS:
        full = rates.seconds(step_cost(shape, rows * length, length, rows * BLOCK))
        part = rates.seconds(step_cost(shape, rows * min(BLOCK, new), length, rows * BLOCK))
        cached = (blocks * full + (steps - min(steps, blocks)) * part) / steps
        mark = "" if rows <= fit else "  (does not fit)"
        lines.append(
            f"{rows:>5}  {1000 * full:>14.1f} ms  {rows * new / (steps * full):>9,.0f}  "
            f"{1000 * cached:>14.1f} ms  {rows * new / (steps * cached):>9,.0f}{mark}"
        )
    lines.append("floors and ceilings: matrix products alone, no queue, no HTTP, no host time")
    return lines
