"""What each cache is expected to gain for a model on this device, before its weights are loaded.

A stand-in of a few small layers decodes one prompt per cache and tells which positions are
computed and read; the model's own sizes turn that into operations, and a measurement of matrix
products of such sizes on the device into time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..models import DiffusionModel

PER_STEP = 4  # tokens decided per forward
LAYERS = 4  # of the stand-in: enough for caches that decide at every layer
WORTH = 1.1  # times faster than no cache; less is lost in what is not predicted


@dataclass(frozen=True)
class Gain:
    """``operations``, ``time``: how many times less than without a cache."""

    cache: str
    operations: float
    time: float
    layerwise: bool

    @property
    def text(self) -> str:
        result = f"{self.time:.1f}x faster ({self.operations:.1f}x fewer operations)"
        if self.time < WORTH:
            result += ": leave it for such a shape"
        if self.layerwise:
            result += ", less what it does at every layer on the host"
        return result


def gains(
    config: Any, device: torch.device, dtype: torch.dtype, prompt: int, new: int
) -> Iterator[Gain]:
    """The expected gain of every cache that bidirectional models can use, by its name.

    ``config``: a transformers config; ``prompt``, ``new`` tokens, `PER_STEP` of them decided per
    forward, in blocks of 32.
    """
    from .. import cache as caches
    from ..capabilities import BLOCK_CAUSAL
    from ..eval.cost import Rates, Shape, costs

    shape, model = Shape.of(config), stand_in(prompt + new)
    rates = Rates.measure(shape, device, dtype)
    base: tuple[float, float] | None = None
    for name in ("none", *(n for n in sorted(caches.CACHES) if n != "none")):
        cache = caches.compose(name)
        if BLOCK_CAUSAL in cache.needs:
            continue
        steps = list(costs(shape, decode(model, cache, prompt, new)))
        result = sum(s.operations for s in steps), sum(rates.seconds(s) for s in steps)
        base = base or result
        if name != "none":
            yield Gain(name, base[0] / result[0], base[1] / result[1], cache.layerwise)


def decode(model: DiffusionModel, cache: Any, prompt: int, new: int) -> Any:
    """A traced result of the stand-in, in random order where the cache has to know it."""
    from ..api import generate

    sampler = "llada(remasking=random)" if cache.needs else "llada"
    return generate(
        model, [1] * prompt, sampler=sampler, cache=cache, eos_policy="none", trace=True,
        max_new_tokens=new, block_length=32, steps=max(1, new // PER_STEP),
    )  # fmt: skip


def stand_in(context: int) -> DiffusionModel:
    """A network of small layers that reads anything."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..models import load

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=LAYERS,
        num_attention_heads=2, max_position_embeddings=context,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = LlamaForCausalLM(config)
    return load(network, family="llada", mask_token_id=31, eos_token_id=0)
