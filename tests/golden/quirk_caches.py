"""Caches of released code that the library does not have, beside the traces that need them, known
by name to `cache_of` alone."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dllm.cache import CACHES, Plan, Slots
from dllm.cache.base import Cache, full_plan
from dllm.cache.d2f import D2FCache
from dllm.cache.dcd import DCDCache
from dllm.cache.delayed import DelayedCache, KeptBlocks
from dllm.cache.dkv import DKVPD, DKVDecode
from dllm.cache.dsb import DSBCache
from dllm.cache.window_diffusion import WindowDiffusion
from dllm.core.canvas import BoolArray, Canvas, IntArray
from dllm.core.spec import parse

from .quirks import Fed, Released

RELEASED_CACHES: Released[Any] = Released(CACHES)


def cache_of(spec: str) -> Any:
    """The cache that ``spec`` names, one of released code or of the library."""
    (cache,) = parse(spec, RELEASED_CACHES)
    return cache


@RELEASED_CACHES.register("released_dsb")
@dataclass(frozen=True)
class ReleasedDSBCache(DSBCache):
    """Feeds what `ReleasedDSB` says; where logits are shifted, the first position of what is fed
    is predicted from its own row."""

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        fed = canvas.state(Fed)
        if fed.whole:
            return full_plan(canvas)
        return Plan(np.arange(fed.first, fed.end), floor=fed.first)


@RELEASED_CACHES.register("released_d2f")
@dataclass(frozen=True)
class ReleasedD2F(D2FCache):
    """Where logits are shifted, the row left of the open blocks is not computed again."""

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        kept = slots.state(KeptBlocks)
        before = kept.end
        plan = super().plan(canvas, slots, targets)
        canvas.state(Fed).first = kept.end
        return replace(plan, floor=before)

    def branch(self, fork: Canvas, plan: Plan) -> Plan:
        return replace(super().branch(fork, plan), floor=plan.floor)


class Forgetful(Cache):
    """A changed position is computed again by the next refresh, if ever."""

    @property
    def recompute_pending(self) -> bool:
        return False


@RELEASED_CACHES.register("released_dcd")
@dataclass(frozen=True)
class ReleasedDCD(Forgetful, DCDCache):
    """A decided token or padding outside the range is not computed before the next refresh."""


@RELEASED_CACHES.register("released_delayed")
@dataclass(frozen=True)
class ReleasedDelayed(DelayedCache):
    """Of what is computed the first position is predicted from its own row."""

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        plan = super().plan(canvas, slots, targets)
        return plan if plan.refresh else replace(plan, floor=int(plan.compute[0]))


@RELEASED_CACHES.register("released_dkv")
@dataclass(frozen=True)
class ReleasedDKV(DKVDecode):
    """dKV-Cache for LLaDA: starts over when a block opens, and computes all in its second step."""

    by_block = True

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        plan = super().plan(canvas, slots, targets)
        return full_plan(canvas) if canvas.block_step == 1 else plan


@dataclass(slots=True)
class PreviousMasks:
    """What was undecided when the previous step began; None before the first."""

    masked: BoolArray | None = None


@RELEASED_CACHES.register("shifted_dkv")
@dataclass(frozen=True)
class ShiftedDKV(Forgetful, DKVDecode):
    """dKV-Cache for Dream: a position may rest once its right neighbour is decided, which freezes
    positions that still hold [MASK], or once ``both`` are."""

    both: bool = False

    def undecided(self, canvas: Canvas) -> IntArray:
        before = canvas.state(PreviousMasks)
        masked = canvas.masked[: canvas.length] if before.masked is None else before.masked
        before.masked = canvas.masked.copy()
        busy = np.append(masked[1:], canvas.step == 1)  # row p scores position p + 1
        if self.both:
            busy |= masked
            busy[-1] = busy[-2]
        return np.flatnonzero(busy[: canvas.length])


@RELEASED_CACHES.register("shifted_dkv_pd")
@dataclass(frozen=True)
class ShiftedDKVPD(ShiftedDKV, DKVPD):
    """The same of dKV-Cache-PD."""

    refresh_every: float | None = 4


@RELEASED_CACHES.register("released_window_diffusion")
@dataclass(frozen=True)
class ReleasedWindowDiffusion(WindowDiffusion):
    """Window-Diffusion for LLaDA: a phase goes on when the active masks have left its window."""

    def _left(self, active: IntArray, window: IntArray | None) -> bool:
        return False


@dataclass(slots=True)
class Span:
    """First, last and kept position of a phase."""

    range: tuple[int, int, int] = (0, 0, 0)


@RELEASED_CACHES.register("released_window_dream")
@dataclass(frozen=True)
class ReleasedWindowDream(WindowDiffusion):
    """Window-Diffusion for Dream: computes from the first mask to the one after the ``active``-th,
    an end that stays, or with ``sliding`` moves, during the phase, and never what lies beyond
    ``window`` - 1 masks.  A refresh commits the first mask."""

    sliding: bool = False

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        masks, phase = np.flatnonzero(canvas.masked[: canvas.length]), slots.state(Span)
        after = int(masks[self.active]) if len(masks) > self.active else canvas.length
        assert self.window is not None, "compose sets open fields"
        if self.due(canvas, slots):
            kept = canvas.length - len(masks[self.window - 1 :])
            phase.range = int(masks[0]), after, kept
            return Plan(np.arange(kept), np.arange(kept), answers=masks[: self.active])
        start, end, kept = phase.range
        end = after if self.sliding else end
        return Plan(np.arange(start, end), np.arange(kept), answers=masks[masks < end])
