"""d2Cache: recompute masks that will soon be decided, and tokens that receive much attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.canvas import Canvas, FloatArray, IntArray
from ..core.capabilities import WHOLE_REGION
from ..core.limits import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, bounds
from ..core.shared import certainty_density
from .base import PARTIAL, Layer, Plan, Slots, full_plan, register
from .refresh import Refreshing


@dataclass(slots=True)
class Seen:
    """(N,) ``confidence`` of each position's last prediction, None before the first step."""

    confidence: FloatArray | None = None


@register(
    "d2", paper="d2Cache: Accelerating Diffusion-Based LLMs via Dual Adaptive Caching",
    arxiv="2509.23094",
)  # fmt: skip
class D2Cache(Refreshing):
    """Compute the most confident masks among decided neighbours, and what the rest attends to most.

    These are ``k`` masks, what was decided just now, and those of the rest that hold the share
    ``p`` of the attention flowing to it.  A mask's score is its last confidence times the density
    of decided positions around it (Gaussian of width ``sigma``).  Masks of the window come before
    those to its right, which compete up to the end of the block that holds the ``k``-th mask of the
    row.  Attention flow is the column mass of the product of all layers' attention (attention
    rollout), where positions that are not computed pass on only themselves; at least one position
    is taken for it.  What lies between two computed positions at most ``inflate`` apart is
    computed, too.  Where logits are shifted, the rows that score the masks stand for them.
    Everything is computed in the first step only.  Needs room for the attention of all layers, L x
    Q x N, in the host's memory.
    """

    offers = PARTIAL - {WHOLE_REGION}
    layerwise = True
    limits = bounds(k=COUNT, p=SHARE, sigma=POSITIVE, inflate=NOT_NEGATIVE)

    k: int = 32
    p: float = 0.1
    sigma: float = 10.0
    inflate: int = 0

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        flow = rollout(slots.layers.get(0, {}), canvas.length)
        for lane in slots.layers.values():
            lane.clear()
        masks = np.flatnonzero(canvas.masked[: canvas.length])
        if self.due(canvas, slots):
            return replace(full_plan(canvas), asks=masks)
        chosen = self._masks(canvas, slots)
        rows = np.union1d(np.maximum(chosen - slots.shift, 0), slots.waiting(canvas.length))
        compute = fill_gaps(self._flowing(canvas, slots, rows, flow), self.inflate)
        computed = masks[np.isin(np.maximum(masks - slots.shift, 0), compute)]
        return Plan(compute, answers=computed, asks=computed)

    def _masks(self, canvas: Canvas, slots: Slots) -> IntArray:
        seen = slots.state(Seen)
        assert seen.confidence is not None, "the first step computes everything"
        block, origin, size, least = self._block(canvas, slots)
        low, high = int(block[0]), int(block[-1]) + 1
        masks = np.flatnonzero(canvas.masked[: canvas.length])
        last = int(masks[self.k - 1]) if len(masks) >= self.k else canvas.end - 1
        end = max(least, origin + ((last - origin) // size + 1) * size)
        masks = masks[(masks >= low) & (masks < end)]
        density = certainty_density(canvas, self.sigma)
        score = seen.confidence[masks] * density[masks - canvas.start]
        ranked = np.lexsort((-score, masks >= high))
        return np.sort(masks[ranked[: self.k]])

    def _block(self, canvas: Canvas, slots: Slots) -> tuple[IntArray, int, int, int]:
        """The masks of the window, where blocks are counted from, their length, and the least end
        of what competes."""
        low, high = canvas.window
        return canvas.masks(), low, high - low, high

    def _flowing(self, canvas: Canvas, slots: Slots, rows: IntArray, flow: FloatArray) -> IntArray:
        """``rows``, and what the rest attends to most."""
        return np.union1d(rows, nucleus(flow, rows, self.p))

    def after_attention(self, canvas: Canvas, slots: Slots, layer: Layer) -> None:
        layer.memory[layer.index] = layer.stream, layer.attention(layer.stream)

    def after_step(
        self, canvas: Canvas, slots: Slots, positions: IntArray, logprob: FloatArray
    ) -> None:
        seen = slots.state(Seen)
        if seen.confidence is None:
            seen.confidence = np.zeros(len(canvas.tokens), np.float32)
        seen.confidence[positions] = np.exp(logprob)


def nucleus(flow: FloatArray, taken: IntArray, p: float) -> IntArray:
    """Of the positions that are not ``taken`` those of largest ``flow`` that hold together at most
    the share ``p`` of it, at least one; none at ``p`` 0."""
    rest = np.setdiff1d(np.arange(len(flow)), taken)
    if p >= 1 or not p:
        return rest if p else rest[:0]
    ranked = rest[np.argsort(-flow[rest], kind="stable")]
    share = np.cumsum(flow[ranked]) / max(float(flow[rest].sum()), 1e-30)
    return ranked[: max(1, int(np.count_nonzero(share <= p)))]


def rollout(layers: dict[Any, Any], length: int) -> FloatArray:
    """(N,) how much of all outputs flows back to each position, from the top layer down."""
    flow = np.ones(length, np.float32)
    for index in range(len(layers))[::-1]:
        computed, rows = layers[index]
        keep = computed < length
        computed, rows = computed[keep], rows[keep, :length]
        passed = flow[computed] / 2
        flow[computed] = passed
        flow += passed @ rows
    return flow


def fill_gaps(positions: IntArray, width: int) -> IntArray:
    """``positions`` and what lies between two of them that are at most ``width`` apart."""
    if not width or not positions.size:
        return positions
    gaps = np.flatnonzero(np.diff(positions) <= width)
    inner = [np.arange(positions[i], positions[i + 1]) for i in gaps]
    return np.union1d(positions, np.concatenate([positions, *inner]))
