"""Fast-dLLM's prefix and dual cache: freeze what lies outside the open block.

Both recompute everything when a block opens; the predictions of that refresh are used like any
other step's, and it repairs the slots of the previous block's last commits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..canvas import Canvas
from ..capabilities import BRANCHES, REGION_LOGITS, WINDOW_LOGITS
from ..errors import ConfigError
from .base import Cache, Plan, Slots, everything, register

FAST_DLLM = "Fast-dLLM: Training-free Acceleration of Diffusion LLM"


@dataclass(frozen=True)
class BlockCache(Cache):
    """Shared by both: when to refresh.

    Besides every block opening, ``refresh_every`` steps (1 = always, i.e. exact) or after
    ``refresh_after`` committed tokens; None (default) means never in between.
    """

    refresh_every: int | None = None
    refresh_after: int | None = None

    def __post_init__(self) -> None:
        for name in ("refresh_every", "refresh_after"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")

    def due(self, canvas: Canvas, slots: Slots) -> bool:
        """Whether this step refreshes; remembers when it does."""
        undecided = int(canvas.masked.sum())
        block, steps, masks = slots.memory.get("refresh", (None, 0, 0))
        due = (
            block != canvas.block
            or (self.refresh_every is not None and steps + 1 >= self.refresh_every)
            or (self.refresh_after is not None and masks - undecided >= self.refresh_after)
        )
        slots.memory["refresh"] = (canvas.block, 0, undecided) if due else (block, steps + 1, masks)
        return due

    def first_to_last(self, canvas: Canvas) -> tuple[int, int]:
        """Positions recomputed between refreshes."""
        raise NotImplementedError

    def plan(self, canvas: Canvas, slots: Slots) -> Plan:
        if self.due(canvas, slots):
            return everything(canvas)
        return Plan(np.arange(*self.first_to_last(canvas)))


@register("prefix", paper=FAST_DLLM, arxiv="2505.22618")
@dataclass(frozen=True)
class PrefixCache(BlockCache):
    """Freeze everything left of the open block; recompute from its start to the end."""

    offers = frozenset({REGION_LOGITS, WINDOW_LOGITS, BRANCHES})

    def first_to_last(self, canvas: Canvas) -> tuple[int, int]:
        return canvas.window[0], canvas.length


@register("dual", paper=FAST_DLLM, arxiv="2505.22618")
@dataclass(frozen=True)
class DualCache(BlockCache):
    """Freeze everything outside the open block; recompute the block alone."""

    offers = frozenset({WINDOW_LOGITS, BRANCHES})

    def first_to_last(self, canvas: Canvas) -> tuple[int, int]:
        return canvas.window
