"""d2Cache: recompute masks that will soon be decided, and tokens that receive much attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..canvas import Canvas, FloatArray, IntArray
from ..capabilities import WHOLE_REGION
from ..errors import ConfigError
from .base import SOME, Layer, Plan, Slots, everything, register
from .refresh import Refreshing


@dataclass(slots=True)
class Confidence:
    """(N,) the confidence of each position's last prediction, 0 where there was none."""

    of: FloatArray | None = None


@register(
    "d2", paper="d2Cache: Accelerating Diffusion-Based LLMs via Dual Adaptive Caching",
    arxiv="2509.23094",
)  # fmt: skip
@dataclass(frozen=True)
class D2Cache(Refreshing):
    """Compute the surest masks among decided neighbours, and what the rest attends to most.

    These are ``k`` masks and those decided positions that together receive the share ``p`` of the
    attention that flows to decided positions.  A mask's score is its last confidence times the
    density of decided positions around it (Gaussian of width ``sigma``); only the sampler's targets
    and the first ``k`` masks compete.  Attention flow is the column mass of the product of all
    layers' attention (attention rollout), where positions that are not computed pass on only
    themselves.  Gaps of up to ``inflate`` positions between computed ones are filled.  Everything
    is computed in the first step only.  Reconstructed from the paper where the released code, whose
    confidences are never updated, does something else.  Needs room for the attention of all layers,
    L x Q x N, in the host's memory.
    """

    offers = SOME - {WHOLE_REGION}
    layerwise = True

    k: int = 32
    p: float = 0.1
    sigma: float = 10.0
    inflate: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 1 or self.inflate < 0 or not self.sigma > 0 or not 0 <= self.p <= 1:
            raise ConfigError("d2 wants k >= 1, p in [0, 1], sigma > 0 and inflate >= 0")

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        flow = rollout(slots.layers.get(0, {}), canvas.length)
        for lane in slots.layers.values():
            lane.clear()
        if self.due(canvas, slots):
            return everything(canvas)
        chosen = self._masks(canvas, slots, targets)
        rows = np.maximum(chosen - slots.shift, 0)
        rows = np.union1d(rows, chosen)
        compute = np.union1d(rows, self._decided(canvas, flow, rows))
        return Plan(fill_gaps(compute, self.inflate), answers=chosen)

    def _masks(self, canvas: Canvas, slots: Slots, targets: IntArray) -> IntArray:
        masks = np.flatnonzero(canvas.masked[: canvas.length])
        masks = np.union1d(masks[: self.k], targets)
        confidence = slots.state(Confidence).of
        assert confidence is not None, "the first step computes everything"
        score = confidence[masks] * density(canvas, self.sigma)[masks]
        score[masks == targets[score[np.isin(masks, targets)].argmax()]] = np.inf
        return np.sort(masks[np.argsort(-score, kind="stable")[: self.k]])

    def _decided(self, canvas: Canvas, flow: FloatArray, rows: IntArray) -> IntArray:
        rest = np.setdiff1d(np.flatnonzero(~canvas.masked[: canvas.length]), rows)
        ranked = rest[np.argsort(-flow[rest], kind="stable")]
        share = np.cumsum(flow[ranked]) / max(float(flow[ranked].sum()), 1e-30)
        if self.p >= 1:
            return rest
        return ranked[: int(np.searchsorted(share, self.p)) + 1] if self.p else rest[:0]

    def after_attention(self, canvas: Canvas, slots: Slots, layer: Layer) -> None:
        rows = layer.attention(layer.stream).astype(np.float16)
        layer.memory[layer.index] = layer.stream, rows

    def after_step(
        self, canvas: Canvas, slots: Slots, positions: IntArray, logprob: FloatArray
    ) -> None:
        confidence = slots.state(Confidence)
        if confidence.of is None:
            confidence.of = np.zeros(len(canvas.tokens), np.float32)
        confidence.of[positions] = np.exp(logprob)


def rollout(layers: dict[Any, Any], length: int) -> FloatArray:
    """(N,) how much of all outputs flows back to each position, from the top layer down."""
    flow = np.ones(length, np.float32)
    for index in range(len(layers))[::-1]:
        computed, rows = layers[index]
        keep = computed < length
        computed, rows = computed[keep], rows[keep, :length].astype(np.float32)
        passed = flow[computed] / 2
        flow[computed] = passed
        flow += passed @ rows
    return flow


def density(canvas: Canvas, sigma: float) -> FloatArray:
    """(N,) share of a Gaussian around each position that lies on decided ones.  What lies left of
    the canvas counts as decided, what lies right of it only if its last position is."""
    reach = int(np.ceil(4 * sigma))
    known = np.pad(
        ~canvas.masked[: canvas.length].astype(np.bool_), reach,
        constant_values=((True, not canvas.masked[canvas.length - 1]),),
    )  # fmt: skip
    weights = np.exp(-((np.arange(2 * reach + 1) - reach) ** 2) / (2 * sigma**2))
    result: FloatArray = np.convolve(known, weights / weights.sum(), "valid").astype(np.float32)
    return result


def fill_gaps(positions: IntArray, width: int) -> IntArray:
    """``positions`` and what lies in gaps of at most ``width`` between them."""
    if not width or not positions.size:
        return positions
    gaps = np.flatnonzero(np.diff(positions) - 1 <= width)
    inner = [np.arange(positions[i], positions[i + 1]) for i in gaps]
    return np.union1d(positions, np.concatenate([positions, *inner]))
