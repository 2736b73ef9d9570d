"""Model families and the loader.

`load` turns a name into a `DiffusionModel`; a `Family` says how checkpoints of one kind are read.
"""

from . import (
    a2d,
    autoregressive,
    block_causal,
    dream,
    llada,
    llada2,
    mixtures,
    nemotron,
    seed,
)
from .attention import Segment
from .family import (
    Facts,
    Family,
    Published,
    Release,
    demand,
    families,
    register_family,
    require,
)
from .loader import load
from .model import DiffusionModel

__all__ = [
    "DiffusionModel",
    "Facts",
    "Family",
    "Published",
    "Release",
    "Segment",
    "a2d",
    "autoregressive",
    "block_causal",
    "demand",
    "dream",
    "families",
    "llada",
    "llada2",
    "load",
    "mixtures",
    "nemotron",
    "register_family",
    "require",
    "seed",
]
