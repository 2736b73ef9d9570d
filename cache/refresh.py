"""When a cache recomputes everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..canvas import Canvas
from ..errors import ConfigError
from .base import Cache, Slots


def check_interval(name: str, value: int | None) -> None:
    """An interval is at least 1, or None for never."""
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class Refreshing(Cache):
    """A cache that recomputes everything in its first step, then every ``refresh_every`` steps
    (1 = always, i.e. exact) or after ``refresh_after`` committed tokens; None means never.

    Steps are counted on a fixed clock: a refresh falls on the first forward at or after each
    multiple of ``refresh_every``.  Where several tokens are committed per step, ``refresh_after``
    is the steadier measure.
    """

    refresh_every: int | None = None
    refresh_after: int | None = None

    by_block: ClassVar[bool] = False  # refresh at every block opening and count from there

    def __post_init__(self) -> None:
        check_interval("refresh_every", self.refresh_every)
        check_interval("refresh_after", self.refresh_after)

    def due(self, canvas: Canvas, slots: Slots) -> bool:
        """Whether this step refreshes; remembers when it does."""
        undecided = int(canvas.masked.sum())
        block, step = (canvas.block, canvas.block_step) if self.by_block else (0, canvas.step)
        phase = block, step // self.refresh_every if self.refresh_every else 0
        last, masks = slots.memory.get("refresh", (None, 0))
        due = phase != last or (
            self.refresh_after is not None and masks - undecided >= self.refresh_after
        )
        if due:
            slots.memory["refresh"] = phase, undecided
        return due
