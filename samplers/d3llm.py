"""d3LLM's multi-block decoding: later blocks open while earlier ones are being decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..canvas import Blocks, BoolArray, Canvas, IntArray
from ..capabilities import ENTROPY
from ..errors import ConfigError
from ..spec import FamilyDefaults
from .base import Part, Selector, View, Window
from .compose import register
from .eos import Eos
from .scorers import NegEntropy

MULTI_BLOCK = "d3LLM: Ultra-Fast Diffusion LLM using Pseudo-Trajectory Distillation"


@dataclass
class Stages:
    """Which of the opened blocks are active, and where those lie that are undecided yet."""

    active: list[bool] = field(default_factory=lambda: [True])
    live: list[tuple[int, int]] = field(default_factory=list)


@register("staged_blocks", paper=MULTI_BLOCK, arxiv="2601.07568")
@dataclass(frozen=True)
class StagedBlocks(Window):
    """Blocks that open one per step, each when the one before has come far enough.

    ``block_length`` (32).  A block opens when ``block_add_threshold`` (0.5) of the last open one is
    decided, and becomes active when ``decoded_token_threshold`` (0.5) of the one before it is: only
    in active blocks must every step decide something (see `D3LLM` and `D2F`).  Both 1.0 make static
    blocks.
    """

    block_length: int | None = None
    block_add_threshold: float = 0.5
    decoded_token_threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.block_length is not None and self.block_length < 1:
            raise ConfigError(f"block_length must be at least 1, not {self.block_length}")
        for name in ("block_add_threshold", "decoded_token_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share in [0, 1], not {getattr(self, name)}")

    def advance(self, canvas: Canvas) -> None:
        size = self.block_length or 32
        open_ = canvas.masked[canvas.start : canvas.end]
        if not open_.any():
            return
        edges = np.arange(canvas.start, canvas.end, size)
        masks = np.add.reduceat(open_.astype(np.int64), edges - canvas.start)
        progress = 1 - masks / np.diff(edges, append=canvas.end)
        before = np.append(1.0, progress[:-1])
        state = canvas.state(Stages)
        ready = before >= self.decoded_token_threshold
        state.active = [a or bool(r) for a, r in zip(state.active, ready, strict=False)]
        opened = len(state.active)
        if opened < len(edges) and progress[opened - 1] >= self.block_add_threshold:
            state.active.append(bool(ready[opened]))
            opened += 1
        first, ends = int(np.flatnonzero(masks)[0]), np.append(edges[1:], canvas.end)
        state.live = [
            (int(edges[i]), int(ends[i])) for i in range(opened) if state.active[i] and masks[i]
        ]
        canvas.state(Blocks).edges = np.append(edges[:opened], ends[opened - 1])
        window = int(edges[first]), int(ends[opened - 1])
        if window != canvas.window:
            canvas.open_window(*window)


@register("d3llm", paper=MULTI_BLOCK, arxiv="2601.07568")
@dataclass(frozen=True)
class D3LLM(Selector):
    """Commit what has an entropy of at most ``tau`` nats, and something in the first active block.

    Where nothing of the first active block is sure enough, its surest position is committed;
    with ``anywhere`` (the official code for LLaDA: True, for Dream: False) the surest position of
    all is committed in any case.  ``tau`` 0.5.  Blocks open in stages (`StagedBlocks`), a stop id
    ends the region (``first_commit``).  Meant for d3LLM's distilled checkpoints: without their
    training, far blocks are decided before they can be.  Its cache is ``delayed``.
    """

    needs = frozenset({ENTROPY})
    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"anywhere": True},
        "dream": {"anywhere": False},
    }

    tau: float = 0.5
    anywhere: bool | None = None

    def __post_init__(self) -> None:
        if not self.tau >= 0:
            raise ConfigError(f"tau must not be negative, not {self.tau}: it is an entropy in nats")

    def companions(self) -> tuple[Part, ...]:
        return (StagedBlocks(), NegEntropy(), Eos("first_commit"))

    def select(self, view: View) -> BoolArray:
        chosen: BoolArray = view.score >= -self.tau
        if not len(chosen):
            return chosen
        if self.anywhere:
            chosen[view.score.argmax()] = True
        for block in view.canvas.state(Stages).live[:1]:
            decide_something(view, chosen, *block)
        return chosen


def decide_something(view: View, chosen: BoolArray, low: int, high: int) -> None:
    """Choose the best position of ``[low, high)`` where none of them is chosen yet."""
    here: IntArray = np.flatnonzero((view.positions >= low) & (view.positions < high))
    if here.size and not chosen[here].any():
        chosen[here[view.score[here].argmax()]] = True
