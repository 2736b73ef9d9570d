"""Deferred Commitment Decoding: a window that slides over what is not sure yet."""

from dataclasses import dataclass

import numpy as np

from ..core.canvas import BoolArray, Canvas
from ..core.capabilities import CONSTRAINED, FIXED_LENGTH, REPEATABLE, Capability
from ..core.errors import ConfigError
from ..core.limits import COUNT, NOT_NEGATIVE, bounds
from .base import Part, View, Window
from .compose import register
from .eos import Eos
from .turn import Course, Turn


def slide(canvas: Canvas, low: int, high: int) -> None:
    """Move the window; a window that slides stays the same block."""
    if canvas.block < 0:
        canvas.open_window(low, high)
    canvas.window = (low, high)


@dataclass
class Border:
    """The right ``edge`` of the current block and by how much it was ``extended``; the ``wish`` is
    where the window would end without it."""

    edge: int | None = None
    extended: int = 0
    wish: int = 0


@register(
    "dcd",
    paper="Deferred Commitment Decoding for Diffusion Language Models with Confidence-Aware "
    "Sliding Windows",
    arxiv="2601.02076",
)
class DCD(Window):
    """A window that always shows the first ``s_init`` undecided positions, however far they lie.

    It starts at the first undecided position and is at most ``s_max`` (128) wide; what is not sure
    yet waits in it while positions to the right are decided.  ``s_init`` is 16 as in the published
    runs.  With it come the end-of-text rule ``first_commit``, unless another is asked for.

    ``block_length`` confines the window to blocks (semi-causal mode); then ``e_max`` > 0 allows a
    block to be extended by ``e_step`` (4) positions, ``e_max`` in all, whenever the window would
    reach beyond its right edge and a commit of the step would score below ``tau_low`` (0.3; -0.5
    for entropy scores): the step's commits are given up and made again.  The static mode of the
    same code is ``threshold`` with ``eos_policy="block_contains"``.
    """

    limits = bounds(s_init=COUNT, s_max=COUNT, e_step=COUNT, block_length=COUNT, e_max=NOT_NEGATIVE)

    s_init: int = 16
    s_max: int = 128
    block_length: int | None = None
    tau_low: float | None = None
    e_step: int = 4
    e_max: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.e_max and self.block_length is None:
            raise ConfigError("e_max extends blocks: pass block_length too")

    @property
    def needs(self) -> frozenset[Capability]:  # type: ignore[override]
        return frozenset({FIXED_LENGTH} if self.block_length else ())

    @property
    def offers(self) -> frozenset[Capability]:  # type: ignore[override]
        return frozenset() if self.e_max else frozenset({REPEATABLE})

    def companions(self, family: str) -> tuple[Part, ...]:
        widening = Widening(self.tau_low, self.e_step, self.e_max)
        return (Eos("first_commit"), *((widening,) if self.e_max else ()))

    def advance(self, canvas: Canvas) -> None:
        where = np.flatnonzero(canvas.masked[: canvas.end])
        low = int(where[0])
        end = canvas.end if canvas.stop_position is None else canvas.stop_position
        high = int(where[self.s_init]) if len(where) > self.s_init else end
        high = min(high, low + self.s_max)
        slide(canvas, low, min(high, self._edge(canvas, low, high)))

    def _edge(self, canvas: Canvas, low: int, wish: int) -> int:
        """The right edge of the current block, extensions included."""
        if self.block_length is None:
            return canvas.end
        border = canvas.state(Border)
        edge = canvas.block_at(low, self.block_length)[0] if border.edge is None else border.edge
        while edge <= low:
            edge += self.block_length
            border.extended = 0
        border.edge, border.wish = edge, wish
        return min(edge, canvas.end)


@dataclass(frozen=True)
class Widening(Course):
    """Where the window reaches beyond its block and a commit would be unsure, the block gets longer
    and nothing is committed in this step."""

    name = "dcd_widening"
    offers = frozenset({CONSTRAINED})

    tau_low: float | None = None
    e_step: int = 4
    e_max: int = 0

    def decide(self, turn: Turn) -> None:
        chosen = turn.choose()
        if not turn.stopped() and self._widens(turn.view, chosen):
            turn.choose_these(np.zeros(len(chosen), np.bool_))

    def _widens(self, view: View, chosen: BoolArray) -> bool:
        border = view.canvas.state(Border)
        if border.edge is None or border.wish <= border.edge or border.extended >= self.e_max:
            return False
        least = view.score[chosen].min() if chosen.any() else view.score.max(initial=-np.inf)
        if self.tau_low is None or least >= self.tau_low:
            return False
        step = min(self.e_step, self.e_max - border.extended)
        border.edge, border.extended = border.edge + step, border.extended + step
        return True
