"""What a run would take: memory and speed, from a ``config.json`` and a card's data sheet.

Operations per token: 2 P forward; backward 4 P, or 2 P where only an adapter is trained, which
needs no gradients of the weights; 2 P again where activations are recomputed; 2 P for every further
forward without gradients (teacher, first guesses).  Memory: weights in bfloat16, 16 bytes for a
parameter that is trained (float32 copy, gradient, two moments), activations in bfloat16 as stated
below, and logits in float32 with their gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..eval.cost import Shape
from ..models.checkpoint import open_checkpoint
from ..models.headers import blueprint
from ..models.reading import family_of, native_config

SHARE = 0.4  # of a card's dense bfloat16 operations that training reaches


@dataclass(frozen=True)
class Load:
    """One step: ``rows`` texts of ``length`` tokens go through the network with gradients;
    ``others``: forwards without gradients; ``rank`` of the adapter, 0 trains all weights;
    ``teacher``: whether a second copy of the weights is held; ``recomputed``: gradient
    checkpointing; ``head``: tokens whose logits are held at once."""

    rows: int
    length: int
    rank: int = 0
    others: float = 1.0
    teacher: bool = False
    recomputed: bool = True
    head: int | None = None


def forecast(model: str, load: Load, operations: float, memory: float) -> list[str]:
    """Lines of text.  ``operations``: dense bfloat16 operations per second of the hardware;
    ``memory``: its bytes.  Nothing but the config of ``model`` is read."""
    checkpoint = open_checkpoint(model)
    family = family_of(checkpoint)
    config, _ = native_config(checkpoint, family)
    network = blueprint(family, config, checkpoint.name)
    weights = sum(parameter.numel() for parameter in network.parameters())
    shape, tokens = Shape.of(config.get_text_config()), load.rows * load.length
    linears = [m for m in network.modules() if isinstance(m, nn.Linear)]
    sides = sum(sum(m.weight.shape) for m in linears if m is not network.get_output_embeddings())
    trained = load.rank * sides if load.rank else weights
    held = 2 * weights * (2 if load.teacher else 1) if load.rank else 2 * weights * load.teacher
    inside = tokens * (10 * shape.hidden + 4 * shape.intermediate) * 2
    layers = tokens * shape.hidden * 2 * shape.layers
    activations = layers + inside if load.recomputed else inside * shape.layers
    logits = (tokens if load.head is None else min(load.head, tokens)) * shape.vocabulary * 8
    parts = {"weights": held, "trained": 16 * trained, "activations": activations, "logits": logits}
    total = sum(parts.values())
    passes = 2 + (2 if load.rank else 4) + 2 * load.recomputed + 2 * load.others
    per_token = passes * weights + 12 * trained * bool(load.rank)
    speed = SHARE * operations / per_token
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    verdict = "fits" if total < 0.95 * memory else "does not fit: fewer rows, or a shorter length"
    return [
        f"{checkpoint.name}: {weights / 1e6:,.0f}M parameters, {trained / 1e6:,.1f}M trained",
        f"{total / 1e9:.1f} GB of {memory / 1e9:.0f} GB ({listed}): {verdict}",
        f"{per_token / 1e9:.2f} GFLOP per token; {speed:,.0f} tokens per second at {SHARE:.0%} of "
        f"{operations / 1e12:g} TFLOP/s, {tokens / speed:.2f} s per step of {tokens:,} tokens",
    ]
