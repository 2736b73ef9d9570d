"""Window-Diffusion: decode among the leftmost masks, cache the next few, ignore the rest."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..core.canvas import BoolArray, Canvas, IntArray
from ..core.errors import ConfigError
from ..core.limits import COUNT, bounds
from ..core.spec import FamilyDefaults
from .base import Plan, Refreshing, Slots, full_plan, register


@dataclass(slots=True)
class Phase:
    """What a phase began with: ``masked`` (N,) bool and the positions it attends to (``window``),
    None until its first step; ``near``: what its refresh left over of those far away."""

    masked: BoolArray | None = None
    window: IntArray | None = None
    near: IntArray | None = None


@register("window_diffusion", paper="Window-Diffusion", arxiv="2601.20332")
class WindowDiffusion(Refreshing):
    """Compute the first masks, attend to a window of them and to what is decided.

    The first ``active`` masks are computed; they attend to the first ``window`` masks.  Masks
    farther away neither attend nor are attended to.  A phase is a refresh, which serves every
    target, and ``refresh_every - 1`` steps that serve only the active masks.  Positions decided
    during a phase stay active until it ends.  With one token per step the paper uses ``active`` 16,
    ``refresh_every`` 32 and, by family, ``window`` 64 and refreshes of all positions (``far`` True,
    LLaDA), or 128 and refreshes that leave out the masks beyond the window (Dream).  A phase ends
    early when the active masks leave the window.  Exact with ``refresh_every=1``, if ``far`` or if
    no mask lies beyond the window.

    The paper's early stop at an end of text is the policy ``first_commit`` of `dllm.samplers.eos`.
    """

    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"window": 64, "far": True},
        "dream": {"window": 128, "far": False},
    }
    limits = bounds(active=COUNT, window=COUNT)

    refresh_every: float | None = 32
    active: int = 16
    window: int | None = None
    far: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.active > self.window:
            raise ConfigError(f"active={self.active} must lie between 1 and window={self.window}")

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        assert self.window is not None, "compose sets open fields"
        masks = np.flatnonzero(canvas.masked[: canvas.length])
        due = self.due(canvas, slots)
        active = masks[: self.active]
        phase = slots.state(Phase)
        if not due and phase.masked is None:  # the first step after a refresh
            phase.masked = canvas.masked.copy()
            phase.window = self._near(canvas, masks) if phase.near is None else phase.near
        masked, window = phase.masked, phase.window
        if due or self._left(active, window):
            phase.masked = phase.window = phase.near = None
            if not due:
                self.restart(canvas, slots)
            if self.far:
                return full_plan(canvas)
            phase.near = near = self._near(canvas, masks)
            return Plan(near, near, answers=masks[: self.window])
        assert masked is not None and window is not None, "set in the first step after a refresh"
        decided = np.flatnonzero(masked[: canvas.length] & ~canvas.masked[: canvas.length])
        window = window[window < canvas.length]
        return Plan(np.union1d(active, decided), window, answers=active)

    def _near(self, canvas: Canvas, masks: IntArray) -> IntArray:
        """All but the masks beyond the window: what a phase attends to."""
        return np.setdiff1d(np.arange(canvas.length), masks[self.window :], assume_unique=True)

    def _left(self, active: IntArray, window: IntArray | None) -> bool:
        """Whether the active masks have left the window of the phase."""
        return window is None or not np.isin(active[-1], window)
