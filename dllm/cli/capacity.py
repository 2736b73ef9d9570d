"""``dllm doctor --serve``: rows that fit, the floor of a step, the ceiling of tokens per second.

Formulas: a step computes positions at the rate of this device's own matrix products of the model's
sizes; keys and values of a row over its canvas take memory beside the weights.  Nothing of a
server is in it: no HTTP, no queue, no host; no server is faster.
"""

from __future__ import annotations

from ..errors import ConfigError

PER_STEP = 4  # tokens decided per forward, as `--caches` assumes
ROWS = (1, 2, 4, 8, 16, 32, 64)
BLOCK = 32  # positions that a cached step computes
SHARE = 0.9  # of the free memory that keys and values may take


def table(model: str, prompt: int, new: int, free: int) -> list[str]:
    """Lines of text: what fits, then a line per number of rows.

    ``prompt``, ``new``: tokens of a request; ``free``: bytes.  Raises `ConfigError` for models that
    do not decode by diffusion.
    """
    import torch

    from ..eval.cost import Rates, Shape, step_cost
    from ..models.checkpoint import open_checkpoint
    from ..models.footprint import footprint
    from ..models.reading import family_of, native_config

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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, needs.dtype)
    shape = Shape.of(config)
    rates = Rates.measure(shape, device, dtype)
    row = needs.keys_values * length // max(1, needs.context)
    fit = max(0, int((free * SHARE - needs.weights) // max(1, row)))
    lines = [
        f"{checkpoint.name} in {needs.dtype} on {device}: prompt {prompt}, {new} new tokens, "
        f"{PER_STEP} decided per step",
        f"rows that fit: {fit:,} with keys and values ({row / 2**20:.1f} MiB each), of "
        f"{free / 2**30:.1f} GiB free",
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
