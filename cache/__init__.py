"""Caching layers: what to recompute, what to read."""

from __future__ import annotations

from . import block, dkv, dllm_cache, none, window_diffusion
from .base import CACHES, Cache, Info, Plan, Slots, available, compose, register

__all__ = [
    "CACHES", "Cache", "Info", "Plan", "Slots", "available", "block", "compose", "dkv",
    "dllm_cache", "none", "register", "window_diffusion",
]  # fmt: skip
