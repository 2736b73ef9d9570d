"""Model families and the loader.

`load` turns a name into a `DiffusionModel`; a `Family` says how checkpoints of one kind are read.
"""

from .family import Facts, Family, Published, Release, demand, families, register_family, require
from .loader import load
from .model import DiffusionModel
from .segments import Segment

__all__ = [
    "DiffusionModel", "Facts", "Family", "Published", "Release", "Segment", "demand", "families",
    "load", "register_family", "require",
]  # fmt: skip
