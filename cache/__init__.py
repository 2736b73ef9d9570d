"""Caching layers: what to recompute, what to read."""

from __future__ import annotations

from . import (
    block,
    d2,
    delayed,
    dkv,
    dllm_cache,
    elastic,
    exact,
    none,
    sliding,
    sparse,
    wedlm,
    window_diffusion,
)
from .base import CACHES, Cache, Info, Plan, Slots, available, compose, register

__all__ = [
    "CACHES", "Cache", "Info", "Plan", "Slots", "available", "block", "compose", "d2", "delayed",
    "dkv", "dllm_cache", "elastic", "exact", "none", "register", "sliding", "sparse", "wedlm",
    "window_diffusion",
]  # fmt: skip
