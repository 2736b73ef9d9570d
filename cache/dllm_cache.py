"""dLLM-Cache: reuse features of the prompt for long, of the response for short intervals."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ..core.canvas import Canvas, IntArray
from ..core.capabilities import BRANCHES, FRESH_LOGITS
from ..core.limits import COUNT, SHARE, bounds
from ..core.spec import FamilyDefaults
from .base import ALL, Cache, Layer, Plan, Slots, register
from .dkv import first_row


@dataclass(slots=True)
class Phases:
    """Intervals that have begun, of prompt and response; which of them this step refreshes; the
    positions whose token has just changed."""

    begun: tuple[float, float] = (-1, -1)
    due: tuple[bool, bool] = (True, True)
    changed: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))


@register(
    "dllm_cache",
    paper="dLLM-Cache: Accelerating Diffusion Large Language Models with Adaptive Caching",
    arxiv="2506.06295",
)
class DLLMCache(Cache):
    """Recompute prompt and response now and then, in between what of the response changed most.

    The prompt is computed every ``prompt_every`` steps, the response every ``response_every``, in
    between, at each layer, the ``ratio`` of the response whose values changed most.  Every position
    has a current hidden state at every layer; a layer adds to those it does not compute what it
    added to them last time.  The first layer is always computed in full.  Defaults are the paper's
    for instruct models on GSM8K: 50, 7 for LLaDA, 25, 2 for Dream (whose base model takes 100, 8),
    and 0.25; 1, 1 is exact, ``inf`` is never.  ``force_pending`` (default) also recomputes
    positions that have just changed.  With shifted logits the response begins one position early.

    The keys, values and changes of all positions are kept: more memory than other caches.
    """

    # rows that a layer does not compute look converged
    offers = ALL - {BRANCHES, FRESH_LOGITS}
    layerwise = True
    keeps = "change"

    family_defaults: ClassVar[FamilyDefaults] = {
        "llada": {"prompt_every": 50, "response_every": 7},
        "dream": {"prompt_every": 25, "response_every": 2},
    }
    limits = bounds(prompt_every=COUNT, response_every=COUNT, ratio=SHARE)

    prompt_every: float | None = None
    response_every: float | None = None
    ratio: float = 0.25
    force_pending: bool = True

    def plan(self, canvas: Canvas, slots: Slots, targets: IntArray) -> Plan:
        assert self.prompt_every and self.response_every, "compose sets open fields"
        phases = slots.state(Phases)
        begun = canvas.step // self.prompt_every, canvas.step // self.response_every
        phases.due = begun[0] != phases.begun[0], begun[1] != phases.begun[1]
        phases.begun = begun
        changed = np.flatnonzero(slots.pending[: canvas.length])
        phases.changed = changed if self.force_pending else changed[:0]
        return Plan(np.arange(canvas.length), refresh=all(phases.due))

    def before_layer(self, canvas: Canvas, slots: Slots, layer: Layer) -> IntArray | None:
        prompt_due, response_due = slots.state(Phases).due
        if layer.index == 0 or (prompt_due and response_due):
            return None
        start = first_row(canvas, slots)
        prompt, response = np.arange(start), np.arange(start, canvas.length)
        if not response_due:
            changed = slots.state(Phases).changed
            moved = self._moved(layer, response) if self.ratio else response[:0]
            response = np.union1d(moved, changed[changed >= start])
        return np.concatenate([prompt, response]) if prompt_due else response

    def _moved(self, layer: Layer, response: IntArray) -> IntArray:
        """The positions whose values changed most."""
        similarity = layer.value_similarity(response)  # also keeps all values, for the prompt
        count = int(self.ratio * len(response))
        return np.sort(response[np.argsort(similarity, kind="stable")[:count]])
