"""The exact cache of models that attend to decided tokens first."""

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.capabilities import DECIDED_FIRST
from .base import ALL, Cache, Plan, Slots, register


@register(
    "wedlm",
    paper="WeDLM: Reconciling Diffusion Language Models with Standard Causal Attention for Fast "
    "Inference",
    arxiv="2512.22737",
)
class WeDLMCache(Cache):
    """Keep the decided beginning of the text; compute what is decided behind it and masks; exact.

    For models in which a decided token attends to the decided tokens on its left and to nothing
    else.  Once all of these are decided, its keys and values are final, the same as in
    autoregressive decoding: they are stored by the first step that is fed the whole beginning, one
    step after its last decision.  Tokens decided behind a gap are computed in every step, because
    what is decided in the gap changes them; masks up to the last one that is asked about, because
    each sees those on its left, and no further ones, which it does not see.
    """

    needs = frozenset({DECIDED_FIRST})
    offers = ALL | {DECIDED_FIRST}
    survives_growth = exact = True

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        seen = ~canvas.masked[: canvas.length]
        seen[: targets[-1] + 1] = True
        read = np.flatnonzero(seen)
        return Plan(read[read >= slots.final(canvas)], read)
