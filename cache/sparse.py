"""Sparse-dLLM: read only the keys that matter to the block."""

from dataclasses import dataclass

import numpy as np

from ..core.canvas import Canvas, FloatArray, IntArray
from ..core.capabilities import BRANCHES, WHOLE_REGION
from ..core.limits import SHARE, bounds, limit
from .base import ALL, Layer, LayerPlan, Plan, Slots, full_plan, register
from .refresh import Refreshing


@dataclass(slots=True)
class Stage:
    """What the present step does: "opened" computes all, "ranking" too and ranks, else "sparse"."""

    name: str = ""


@register(
    "sparse",
    paper="Sparse-dLLM: Accelerating Diffusion LLMs with Dynamic Cache Eviction",
    arxiv="2508.02558",
)
class SparseCache(Refreshing):
    """Compute the block alone and attend to the ``retain`` most important positions outside it.

    The first two steps of a block compute everything; in the second, each layer ranks the
    positions outside the block by the product of the block's mean query with their keys, smoothed
    over ``kernel`` (3) neighbours by their maximum.  ``retain`` 0.5 as in the paper's runs.

    Fewer keys are read; the buffer still holds all of them, so no memory is saved here.
    """

    offers = ALL - {BRANCHES, WHOLE_REGION}
    by_block = True
    layerwise = True
    limits = bounds(
        retain=SHARE,
        kernel=limit(lambda n: n % 2 == 1, "{name} must be an odd number, not {value}"),
    )

    retain: float = 0.5
    kernel: int = 3

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        due, stage = self.due(canvas, slots), slots.state(Stage)
        ranking = stage.name == "opened" and not due
        stage.name = "opened" if due else "ranking" if ranking else "sparse"
        if due or ranking:
            return full_plan(canvas)
        return Plan(np.arange(*canvas.window))

    def before_layer(self, canvas: Canvas, slots: Slots, layer: Layer) -> LayerPlan | None:
        if slots.state(Stage).name != "sparse":
            return None
        read = np.union1d(layer.memory[layer.index], layer.stream)
        return LayerPlan(layer.stream, read[read < canvas.length])

    def after_attention(self, canvas: Canvas, slots: Slots, layer: Layer) -> None:
        if slots.state(Stage).name != "ranking":
            return
        block = np.arange(*canvas.window)
        outside = np.setdiff1d(np.arange(canvas.length), block, assume_unique=True)
        importance = layer.key_importance(block, outside)
        seen = importance > -np.inf
        outside, score = outside[seen], smoothed(importance[seen], self.kernel)
        kept = np.argsort(-score, kind="stable")[: int(self.retain * len(outside))]
        layer.memory[layer.index] = outside[np.sort(kept)]


def smoothed(score: FloatArray, kernel: int) -> FloatArray:
    """The maximum over ``kernel`` neighbours, same length."""
    padded = np.pad(score, kernel // 2, constant_values=-np.inf)
    shifted = [padded[i : i + len(score)] for i in range(kernel)]  # also of no scores at all
    result: FloatArray = np.max(shifted, axis=0)
    return result
