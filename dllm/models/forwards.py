"""Layers of transformers that compute the same numbers in fewer operations."""

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import LlamaModel

# The argument that takes a cache: transformers 5.24 renamed it.
CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"
NETWORKS = ("llama", "mistral", "qwen2", "qwen3")


def classes(part: str) -> list[str]:
    """The layers of one ``part`` ("MLP"), by name: a network that nobody loads is not imported."""
    return [f"transformers.models.{n}.modeling_{n}.{n.capitalize()}{part}" for n in NETWORKS]


def replace_forwards(network: nn.Module, kinds: Sequence[str], forward: Callable[..., Any]) -> None:
    """Let the layers of the classes in ``kinds`` (module and name) compute ``forward(layer, ...)``:
    in place, but for layers of other classes, or whose forward somebody has wrapped."""
    for module in network.modules():
        kind = type(module)
        if f"{kind.__module__}.{kind.__qualname__}" in kinds and "forward" not in module.__dict__:
            module.forward = partial(forward, module)


class Recorder:
    """A forward hook that keeps what a layer gives in ``outputs[index]``, and changes nothing: the
    kernels need not stop behind a layer for it, as they do for hooks of unknown kinds."""

    def __init__(self, outputs: dict[int, torch.Tensor], index: int) -> None:
        self.outputs, self.index = outputs, index

    def __call__(self, layer: nn.Module, given: Any, output: Any) -> None:
        self.outputs[self.index] = output[0] if isinstance(output, tuple) else output
