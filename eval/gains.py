"""What each cache is expected to gain for a model of given sizes, on a device.

A small network of random weights decodes a short text per cache.  Its traces say which positions
are computed and read; the model's own sizes turn that into operations, and a measurement of matrix
products of such sizes on the device into time.  What a step costs on the host is the time of the
small network itself, with two numbers of layers: a part per step and a part per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from .. import cache as caches
from ..api import generate
from ..capabilities import FORESIGHT
from ..engine import Recipe
from ..engine.recipe import check_recipe
from ..errors import ConfigError
from ..models import DiffusionModel, load
from ..samplers import compose
from .cost import Rates, Shape, costs

PER_STEP = 4  # tokens decided per forward
LAYERS = 2, 6  # of the small networks
RUNS = 3  # that are timed
WORTH = 1.1  # times faster than no cache; less is lost in what is not predicted


@dataclass(frozen=True)
class Gain:
    """``operations``, ``time``: how many times less than without a cache; ``host``: share of the
    time that is not the network's operations."""

    cache: str
    operations: float
    time: float
    host: float

    @property
    def text(self) -> str:
        result = (
            f"{self.time:.1f}x faster ({self.operations:.1f}x fewer operations, "
            f"{100 * self.host:.0f} % of the time on the host)"
        )
        return result + (": leave it for such a shape" if self.time < WORTH else "")


def gains(
    config: Any, device: torch.device, dtype: torch.dtype, prompt: int, new: int,
    decided_first: bool = False,
) -> list[Gain]:  # fmt: skip
    """The expected gain of every cache that bidirectional models can use, or, with
    ``decided_first``, WeDLM's; largest first.

    ``config``: a transformers config; ``prompt``, ``new`` tokens, `PER_STEP` of them decided per
    forward, in blocks of 32.
    """
    shape = Shape.of(config)
    rates = Rates.measure(shape, device, dtype)
    small = [stand_in(prompt + new, layers, device, decided_first) for layers in LAYERS]
    result: list[Gain] = []
    base: tuple[float, float] | None = None
    for name in ("none", *(n for n in sorted(caches.CACHES) if n != "none")):
        cache = caches.compose(name)
        if not suits(small[0], cache):
            continue
        steps = list(costs(shape, decode(small[0], cache, prompt, new, True)))
        operations = sum(step.operations for step in steps)
        device_time = sum(rates.seconds(step) for step in steps)
        host = host_seconds(small, cache, prompt, new, shape.layers)
        # A GPU works while the host prepares what follows.
        seconds = max(device_time, host) if device.type == "cuda" else device_time + host
        base = base or (operations, seconds)
        if name != "none":
            share = min(1.0, host / seconds)
            result.append(Gain(name, base[0] / operations, base[1] / seconds, share))
    return sorted(result, key=lambda gain: -gain.time)


def host_seconds(
    small: list[DiffusionModel], cache: Any, prompt: int, new: int, layers: int
) -> float:
    """Seconds of a decoding on the host, with so many layers."""
    times: list[float] = [
        min(decode(model, cache, prompt, new, False).seconds for _ in range(RUNS))
        for model in small
    ]
    per_layer = max(0.0, times[1] - times[0]) / (LAYERS[1] - LAYERS[0])
    return times[0] + per_layer * (layers - LAYERS[0])


def suits(model: DiffusionModel, cache: Any) -> bool:
    """Whether the model can use the cache."""
    try:
        check_recipe(Recipe(compose(order(cache))), cache, model)
    except ConfigError:
        return False
    return True


def order(cache: Any) -> str:
    """A sampler of a quota: in random order where the cache has to know it."""
    return "llada(remasking=random)" if FORESIGHT in cache.needs else "llada"


def decode(model: DiffusionModel, cache: Any, prompt: int, new: int, trace: bool) -> Any:
    """A result of a small network."""
    block = min(32, new)
    return generate(
        model, [1] * prompt, sampler=order(cache), cache=cache, eos_policy="none", trace=trace,
        max_new_tokens=new, block_length=block, steps=max(-(-new // block), new // PER_STEP),
    )  # fmt: skip


def stand_in(
    context: int, layers: int, device: torch.device, decided_first: bool = False
) -> DiffusionModel:
    """A network of small layers that reads anything."""
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": layers,
        "num_attention_heads": 2, "max_position_embeddings": context,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: Any = (
            Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=8))
            if decided_first
            else LlamaForCausalLM(LlamaConfig(**sizes))
        )
        network.to(device)
    family = "wedlm" if decided_first else "llada"
    return load(network, family=family, mask_token_id=31, eos_token_id=0)


def within(context: int, prompt: int, new: int) -> tuple[int, int]:
    """Prompt and new tokens, shortened in proportion to what a context holds."""
    total = prompt + new
    if total <= context:
        return prompt, new
    shorter = max(4, context * new // total)
    return context - shorter, shorter


def recommended(result: list[Gain]) -> Gain | None:
    """The fastest one, if it is worth it."""
    return result[0] if result and result[0].time >= WORTH else None
