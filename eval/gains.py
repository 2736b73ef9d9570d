"""What each cache is expected to gain for a model of given sizes, on a device.

For a small model a network of its sizes and random weights decodes with every cache, in turns, and
is timed.  For a large one that would take too long: there a smaller network decodes.  Its traces
say which positions are computed and read; the model's own sizes turn that into operations, and a
measurement of matrix products of such sizes on the device into time.  What a step costs on the host
is the time of the smaller network itself, with two numbers of layers: a part per step and a part
per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from .. import cache as caches
from ..api import generate
from ..cache import Cache
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
TINY = Shape(hidden=16, layers=2, heads=2, kv_heads=2, head_dim=8, intermediate=16, vocabulary=32)
SMALL = 50_000_000  # weights of a network that is built and timed
WORTH = 1.1  # times faster than no cache; less is lost in what is not predicted


@dataclass(frozen=True)
class Gain:
    """``operations``, ``time``: how many times less than without a cache; ``host``: share of the
    time that is not the network's operations, None where the time was measured as a whole."""

    cache: str
    operations: float
    time: float
    host: float | None = None

    @property
    def text(self) -> str:
        how = (
            "measured" if self.host is None else f"{100 * self.host:.0f} % of the time on the host"
        )
        result = f"{self.time:.1f}x faster" if self.time >= WORTH else f"no gain: {self.time:.1f}x"
        return f"{result} ({self.operations:.1f}x fewer operations, {how})"


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
    find = measured if shape.parameters <= SMALL else predicted
    result = find(shape, device, dtype, prompt, new, decided_first)
    return sorted(result, key=lambda gain: -gain.time)


def usable(model: DiffusionModel) -> dict[str, Cache]:
    """Caches that the model can use, "none" first."""
    names = ["none", *(name for name in sorted(caches.CACHES) if name != "none")]
    made = {name: caches.compose(name) for name in names}
    return {name: cache for name, cache in made.items() if suits(model, cache)}


def measured(
    shape: Shape, device: torch.device, dtype: torch.dtype, prompt: int, new: int,
    decided_first: bool = False,
) -> list[Gain]:  # fmt: skip
    """Gains of a network of that shape, from the fastest of a few decodings with each cache."""
    network = stand_in(shape, prompt + new, device, dtype, decided_first)
    kinds = usable(network)
    seconds = dict.fromkeys(kinds, float("inf"))
    for _ in range(RUNS + 1):  # in turns: what else runs on the machine disturbs all alike
        for name, cache in kinds.items():
            took = decode(network, cache, prompt, new, False).seconds
            seconds[name] = min(seconds[name], took)
    operations = {
        name: sum(s.operations for s in costs(shape, decode(network, cache, prompt, new, True)))
        for name, cache in kinds.items()
    }
    return [
        Gain(name, operations["none"] / operations[name], seconds["none"] / seconds[name])
        for name in kinds
        if name != "none"
    ]


def predicted(
    shape: Shape, device: torch.device, dtype: torch.dtype, prompt: int, new: int,
    decided_first: bool = False,
) -> list[Gain]:  # fmt: skip
    """Gains of a network of that shape, computed."""
    rates = Rates.measure(shape, device, dtype)
    small = [
        stand_in(replace(TINY, layers=n), prompt + new, device, torch.float32, decided_first)
        for n in LAYERS
    ]
    result: list[Gain] = []
    base: tuple[float, float] | None = None
    for name, cache in usable(small[0]).items():
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
    return result


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


def suits(model: DiffusionModel, cache: Cache) -> bool:
    """Whether the model can use the cache."""
    try:
        check_recipe(Recipe(compose(order(cache))), cache, model)
    except ConfigError:
        return False
    return True


def order(cache: Cache) -> str:
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
    shape: Shape, context: int, device: torch.device, dtype: torch.dtype,
    decided_first: bool = False,
) -> DiffusionModel:  # fmt: skip
    """A network of that shape and random weights, which reads anything."""
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "max_position_embeddings": context,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network: Any = (
            Qwen3ForCausalLM(Qwen3Config(**sizes))
            if decided_first
            else LlamaForCausalLM(LlamaConfig(**sizes))
        )
        network.to(device, dtype)
    family = "wedlm" if decided_first else "llada"
    return load(network, family=family, mask_token_id=shape.vocabulary - 1, eos_token_id=0)


def within(context: int, prompt: int, new: int) -> tuple[int, int]:
    """Prompt and new tokens, shortened in proportion to what a context holds."""
    total = prompt + new
    if total <= context:
        return prompt, new
    shorter = max(4, context * new // total)
    return context - shorter, shorter


def recommended(result: list[Gain]) -> Gain | None:
    """The fastest one for any checkpoint, if it is worth it."""
    best = next((gain for gain in result if not caches.CACHES[gain.cache].trained), None)
    return best if best is not None and best.time >= WORTH else None
