"""d3LLM's window: later blocks open while earlier ones are being decided."""

from dataclasses import dataclass, field

import numpy as np

from ..core.canvas import Blocks, Canvas
from ..core.capabilities import FIXED_LENGTH
from ..core.limits import COUNT, SHARE, bounds
from .base import Window
from .compose import register


@dataclass
class Stages:
    """Which of the opened blocks are active, and where those lie that are undecided yet."""

    active: list[bool] = field(default_factory=lambda: [True])
    live: list[tuple[int, int]] = field(default_factory=list)


MULTI_BLOCK = "d3LLM: Ultra-Fast Diffusion LLM using Pseudo-Trajectory Distillation"


@register("staged_blocks", paper=MULTI_BLOCK, arxiv="2601.07568")
class StagedBlocks(Window):
    """Blocks that open one per step, each when the one before has come far enough.

    ``block_length`` (32).  A block opens when ``block_add_threshold`` (0.1) of the last open one is
    decided, and becomes active when ``decoded_token_threshold`` (0.95) of the one before it is:
    only in active blocks must every step decide something (see `D3LLM` and `D2F`).  Both 1.0 make
    static blocks.
    """

    needs = frozenset({FIXED_LENGTH})
    limits = bounds(block_length=COUNT, block_add_threshold=SHARE, decoded_token_threshold=SHARE)

    block_length: int | None = None
    block_add_threshold: float = 0.1
    decoded_token_threshold: float = 0.95

    def advance(self, canvas: Canvas) -> None:
        size = min(self.block_length or 32, canvas.end)
        open_ = canvas.masked[canvas.start : canvas.end]
        second = canvas.block_at(canvas.start, size)[1]
        edges = np.append(canvas.start, np.arange(second, canvas.end, size))
        masks = np.add.reduceat(open_.astype(np.int64), edges - canvas.start)
        progress = 1 - masks / np.diff(edges, append=canvas.end)
        before = np.append(1.0, progress[:-1])
        state = canvas.state(Stages)
        ready = before >= self.decoded_token_threshold
        state.active = [a or bool(r) for a, r in zip(state.active, ready, strict=False)]
        first, opened = int(np.flatnonzero(masks)[0]), len(state.active)
        if opened < len(edges) and progress[opened - 1] >= self.block_add_threshold:
            opened += 1
        opened = max(opened, first + 1)  # given text needs no step of its own
        state.active += ready[len(state.active) : opened].tolist()
        ends = np.append(edges[1:], canvas.end)
        state.live = [
            (int(edges[i]), int(ends[i])) for i in range(opened) if state.active[i] and masks[i]
        ]
        canvas.state(Blocks).edges = np.append(edges[:opened], ends[opened - 1])
        window = int(edges[first]), int(ends[opened - 1])
        if window != canvas.window:
            canvas.open_window(*window)
