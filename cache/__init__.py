"""Caching layers: what to recompute, what to read, a file per method."""

from importlib import import_module
from pkgutil import iter_modules

from ..core.spec import Info
from .base import CACHES, Cache, Plan, Slots, available, compose, register

__all__ = ["CACHES", "Cache", "Info", "Plan", "Slots", "available", "compose", "register"]

for _file in iter_modules(__path__):  # importing a file registers its cache
    import_module(f".{_file.name}", __name__)
