"""When a cache recomputes everything."""

from dataclasses import dataclass
from typing import ClassVar

from ..core.canvas import Canvas, IntArray
from ..core.limits import COUNT, bounds
from .base import OPEN_BLOCK, STEP, Cache, Plan, Slots, full_plan


@dataclass(slots=True)
class Clock:
    """When a row was last refreshed: in which ``block``, at which step or block step (``start``,
    where counting begins again), with how many masks left.  ``block`` None: never."""

    block: int | None = None
    start: int = 0
    masks: int = 0


@dataclass(frozen=True)
class Refreshing(Cache):
    """A cache that recomputes everything in its first step, then every ``refresh_every`` steps
    (1 = always, i.e. exact) or after ``refresh_after`` committed tokens; ``inf`` means never, None
    what the paper uses for the model's family, which is never where the cache names nothing.

    Steps are counted on a fixed clock: a refresh falls on the first forward at or after each
    multiple of ``refresh_every``.  A refresh for another reason restarts the clock.  Where several
    tokens are committed per step, ``refresh_after`` is the steadier measure.
    """

    limits = bounds(refresh_every=COUNT, refresh_after=COUNT)

    refresh_every: float | None = None
    refresh_after: float | None = None

    by_block: ClassVar[bool] = False  # refresh at every block opening and count from there

    @property
    def holds(self) -> int:
        """How long the plan of a step holds that refreshes nothing."""
        clocks = self.refresh_every is not None or self.refresh_after is not None
        return STEP if clocks or not self.by_block else OPEN_BLOCK

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        due = self.due(canvas, slots)
        return full_plan(canvas) if due else self.between(canvas, slots, targets)

    def between(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        """What a step computes and reads that refreshes nothing."""
        raise NotImplementedError

    def due(self, canvas: Canvas, slots: Slots) -> bool:
        """Whether this step refreshes; remembers when it does."""
        block, step = self._time(canvas)
        clock = slots.state(Clock)
        start = clock.start if block == clock.block else 0
        elapsed = step - start
        past = elapsed - elapsed % self.refresh_every if self.refresh_every else 0  # whole phases
        if block != clock.block or past:
            self.restart(canvas, slots, start + int(past))
            return True
        commits = clock.masks - int(canvas.masked.sum())
        if self.refresh_after is not None and commits >= self.refresh_after:
            self.restart(canvas, slots, step)
            return True
        return False

    def restart(self, canvas: Canvas, slots: Slots, start: int | None = None) -> None:
        """Count steps from ``start`` (default: this step) and commits from now on."""
        block, step = self._time(canvas)
        start = step if start is None else start
        slots.states[Clock] = Clock(block, start, int(canvas.masked.sum()))

    def _time(self, canvas: Canvas) -> tuple[int, int]:
        return (canvas.block, canvas.block_step) if self.by_block else (0, canvas.step)
