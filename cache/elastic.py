"""Elastic-Cache: refresh when attention drifts, and only the layers above the drift."""

from dataclasses import dataclass, field

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.limits import COUNT, bounds
from .base import PARTIAL, Layer, Plan, Refreshing, Slots, full_plan, register

NEVER = 2**31


@dataclass(slots=True)
class Watch:
    """The masks that compete in this step, and the layer whose attention has turned, above which
    it refreshes; -1 where the step computes everything in any case."""

    active: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    start: int = NEVER


@register(
    "elastic", paper="Attention Is All You Need for KV Cache in Diffusion LLMs", arxiv="2510.14973"
)
class ElasticCache(Refreshing):
    """Compute the first masks; where attention has turned, everything from the next layer on.

    Computed are the first ``beta`` masks.  Each layer watches the decided token that the masks
    attend to most.  When the cosine between its attention now and in the step before falls below
    ``gamma``, all layers above are refreshed from the inputs they had when last computed, so that
    no setting of ``gamma`` is exact; ``refresh_every=1`` is.  ``beta`` 16 and ``gamma`` 0.9 as
    released.  Reconstructed: the attention is averaged over heads, and a token is compared in its
    own layer only, from its second step under watch on.
    """

    offers = PARTIAL
    layerwise = True
    keeps = "input"
    limits = bounds(beta=COUNT)

    beta: int = 16
    gamma: float = 0.9

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        watch, active = slots.state(Watch), targets[: self.beta]
        watch.active, watch.start = active, NEVER
        if self.due(canvas, slots):
            watch.start = -1
            return full_plan(canvas)
        lanes = slots.layers.values()
        watched = {token for lane in lanes for token, _ in lane.values() if token < canvas.length}
        return Plan(np.union1d(active, np.array(sorted(watched), np.int64)), answers=active)

    def before_layer(self, canvas: Canvas, slots: Slots, layer: Layer) -> IntArray | None:
        return np.arange(canvas.length) if 0 <= slots.state(Watch).start <= layer.index else None

    def after_attention(self, canvas: Canvas, slots: Slots, layer: Layer) -> None:
        computed = layer.stream if slots.state(Watch).start >= layer.index else None
        token, before = layer.memory.get(layer.index, (NEVER, None))
        if computed is not None and before is not None and token in computed:
            n = min(len(before), canvas.length)
            now, before = layer.attention(np.array([token]))[0, :n], before[:n]
            lengths = np.linalg.norm(now) * np.linalg.norm(before)
            if now @ before / max(lengths, 1e-30) < self.gamma:
                slots.state(Watch).start = layer.index
        # Choose the token to watch, and remember its attention if it was computed.
        queries = np.maximum(slots.state(Watch).active - slots.shift, 0)
        mass = layer.attention(queries).sum(0)
        mass[canvas.masked[: canvas.length]] = -1
        token = int(mass.argmax())
        seen = computed is None or token in computed
        layer.memory[layer.index] = token, layer.attention(np.array([token]))[0] if seen else None
