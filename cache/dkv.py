"""dKV-Cache: keep the key and value of a token once it was processed as itself.

Keys and values change most when [MASK] becomes a token and little afterwards.  So a decided
position is computed once more, in the next step, and then left alone.
"""

from typing import ClassVar

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.capabilities import FORESIGHT
from ..core.limits import NOT_NEGATIVE, bounds, one_of
from ..core.spec import FamilyDefaults
from .base import ALL, Clock, Plan, Refreshing, Slots, full_plan, register

PAPER = "dKV-Cache: The Cache for Diffusion Language Models"
ARXIV = "2505.15781"


@register("dkv", paper=PAPER, arxiv=ARXIV)
class DKVDecode(Refreshing):
    """Compute what is undecided and what was decided in the last step (dKV-Cache-Decode).

    ``refresh_every``: by family 8 (LLaDA) or 4 (Dream), as in the paper's runs.
    """

    offers = ALL
    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"refresh_every": 8},
        "dream": {"refresh_every": 4},
    }
    refresh_every: float | None = None

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        compute = self.undecided(canvas)  # at every step: a cache built on this one may count on it
        return full_plan(canvas) if self.due(canvas, slots) else Plan(compute)

    def undecided(self, canvas: Canvas) -> IntArray:
        """Positions that may not rest, besides those decided in the last step."""
        return np.flatnonzero(canvas.masked[: canvas.length])


@register("dkv_prefill", paper=PAPER, arxiv=ARXIV)
class DKVPrefill(Refreshing):
    """Compute the prompt once, and everything after it in every step (dKV-Cache-Prefill)."""

    offers = ALL

    def between(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        return Plan(np.arange(first_row(canvas, slots), canvas.length))


@register("dkv_pd", paper=PAPER, arxiv=ARXIV)
class DKVPD(DKVDecode):
    """The prompt rests for good, what follows it like in ``dkv`` (dKV-Cache-PD).

    ``refresh_every`` (4 in the paper) recomputes all but the prompt.
    """

    family_defaults: ClassVar[FamilyDefaults] = {}

    refresh_every: float | None = 4

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        compute, start = self.undecided(canvas), first_row(canvas, slots)
        fresh = slots.state(Clock).block is None
        if self.due(canvas, slots):
            return full_plan(canvas) if fresh else Plan(np.arange(start, canvas.length))
        return Plan(compute[compute >= start])


@register("dkv_greedy", paper=PAPER, arxiv=ARXIV)
class DKVGreedy(Refreshing):
    """Compute what was just decided, what is next and a few neighbours (dKV-Cache-Greedy).

    That is a constant number of positions per step, for samplers that know what they commit before
    the forward.  ``refresh_every`` (2) counts from each block opening; ``window`` (4) neighbours
    are taken around every position of ``center``: "next", those to be decided (as released), or
    "prev", those just decided (which the paper reports as better).
    """

    needs = frozenset({FORESIGHT})
    by_block = True
    limits = bounds(window=NOT_NEGATIVE, center=one_of(("next", "prev")))

    refresh_every: float | None = 2
    window: int = 4
    center: str = "next"

    def between(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        center = targets if self.center == "next" else np.flatnonzero(slots.pending)
        return Plan(np.union1d(targets, neighbours(canvas, center, targets, self.window)))


def first_row(canvas: Canvas, slots: Slots) -> int:
    """The first row that the region needs: the prompt's last when logits are shifted."""
    return max(0, canvas.start - slots.shift)


def neighbours(canvas: Canvas, center: IntArray, targets: IntArray, each: int) -> IntArray:
    """For every position of ``center`` in turn the ``each`` nearest undecided positions that are
    neither targets nor taken yet; the left one first at equal distance."""
    masked = canvas.masked[: canvas.length].copy()
    masked[targets] = False
    taken = []
    for middle in center:
        free = np.flatnonzero(masked)
        near = free[np.argsort(2 * np.abs(free - middle) + (free > middle))[:each]]
        masked[near] = False
        taken.append(near)
    return np.concatenate([center[:0], *taken])
