"""Model families and the loader.

`load` turns a name into a `DiffusionModel`; a `Family` says how checkpoints of one kind are read.
"""

from . import autoregressive, block_causal, dream, llada, llada2
from .attention import Segment
from .family import Facts, Family, Release, demand, families, register_family, require
from .loader import load
from .model import DiffusionModel

__all__ = [
    "DiffusionModel",
    "Facts",
    "Family",
    "Release",
    "Segment",
    "autoregressive",
    "block_causal",
    "demand",
    "dream",
    "families",
    "llada",
    "llada2",
    "load",
    "register_family",
    "require",
]
