"""Layers of transformers that compute the same numbers in fewer operations."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

NETWORKS = ("llama", "mistral", "qwen2", "qwen3")


def classes(part: str, networks: tuple[str, ...] = NETWORKS) -> list[str]:
    """The layers of one ``part``, such as "MLP", of these networks of transformers; by name: a
    network that nobody loads is not imported."""
    return [f"transformers.models.{n}.modeling_{n}.{n.capitalize()}{part}" for n in networks]


def replace_forwards(network: nn.Module, kinds: Sequence[str], forward: Callable[..., Any]) -> None:
    """Let the layers of the classes in ``kinds`` (module and name) compute ``forward(layer, ...)``.

    Changes them in place.  Layers of other classes are left alone, and those whose forward somebody
    has wrapped.
    """
    for module in network.modules():
        kind = type(module)
        if f"{kind.__module__}.{kind.__qualname__}" in kinds and "forward" not in module.__dict__:
            module.forward = partial(forward, module)
