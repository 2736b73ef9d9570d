"""DPad: drop most masks behind the block, the farther away the more."""

from dataclasses import dataclass, field

import numpy as np

from ..core.canvas import SELECTION, Canvas, IntArray
from ..core.limits import COUNT, FINITE, NOT_NEGATIVE, bounds, one_of
from .base import ALL, Plan, Refreshing, Slots, register

BASES = ("none", "prefix", "dual")
DROPOUTS = ("gaussian", "uniform")


@dataclass(slots=True)
class Suffix:
    """The ``positions`` fed behind the window, chosen for ``window``: block and window's end."""

    positions: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    window: tuple[int, int] = (-1, 0)


@register(
    "dpad",
    paper="DPad: Efficient Diffusion Language Models with Suffix Dropout",
    arxiv="2508.14148",
)
class DPadCache(Refreshing):
    """Keep few of the masks behind the block, drawn once per block; the others do not exist.

    Of the ``window`` (128) positions behind the block, the j-th (from 0) stays with probability
    ``scale`` (2) x the density of the standard normal distribution at ``sigma`` (4) x j /
    (``window`` - 1); those beyond it are dropped.  With ``dropout`` "uniform" ``number`` (16) of
    the first ``window`` positions stay, whichever; all, where no more than ``number`` are left
    behind the block.  Given text stays, and so does what a sampler reads, such as ``prophet``.
    What is kept has its true positions.  The published settings differ by task.

    ``base`` (default "prefix"): what else a step computes.  "none": all that it reads; "prefix":
    the window and what is kept behind it; "dual": the window.  The last two compute all that they
    read when a block opens.  The method ends a text behind the block that holds its end:
    ``eos_policy="block_contains"``.
    """

    offers = ALL
    by_block = True
    limits = bounds(
        base=one_of(BASES), dropout=one_of(DROPOUTS), window=COUNT, number=NOT_NEGATIVE,
        sigma=FINITE, scale=FINITE
    )  # fmt: skip

    base: str = "prefix"
    dropout: str = "gaussian"
    sigma: float = 4.0
    scale: float = 2.0
    window: int = 128
    number: int = 16

    def kept(self, canvas: Canvas, behind: IntArray) -> IntArray:
        """Those of the undecided positions ``behind`` the window that stay, ascending."""
        near = behind[behind < canvas.window[1] + self.window]
        if self.dropout == "uniform" and self.number >= len(behind):
            return behind
        noise = canvas.uniform(SELECTION, near) if near.size else np.zeros(0, np.float32)
        if self.dropout == "uniform":
            return np.sort(near[np.argsort(noise, kind="stable")[: self.number]])
        far = float(self.sigma) * (near - canvas.window[1]) / max(self.window - 1, 1)
        kept: IntArray = near[noise < self.scale * np.exp(-(far**2) / 2) / np.sqrt(2 * np.pi)]
        return kept

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        suffix, (low, high) = slots.state(Suffix), canvas.window
        due = self.due(canvas, slots)
        if suffix.window != (canvas.block, high):
            suffix.window, due = (canvas.block, high), True
            masked = canvas.masked[high : canvas.length]
            kept = self.kept(canvas, np.flatnonzero(masked) + high)
            suffix.positions = np.union1d(kept, np.flatnonzero(~masked) + high)
        ahead = suffix.positions
        ahead = ahead[(ahead >= high) & (ahead < canvas.length)]
        read = np.concatenate([np.arange(high), ahead])
        if due or self.base == "none":
            return Plan(read, read)
        return Plan(np.arange(low, high) if self.base == "dual" else read[low:], read)
