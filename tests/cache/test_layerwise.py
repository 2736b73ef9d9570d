"""What caches that decide at every layer promise there."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from dllm import cache as caches
from dllm import generate
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.engine.layers import View
from dllm.samplers import compose
from dllm.samplers.scorers import Random
from dllm.samplers.windows import StaticBlocks

from ..decoding import Decoding
from ..thin import some
from .test_every_pair import MODELS, load
from .test_protocol import Some, TakeBack, noise

LAYERWISE = ["dllm_cache(6, 3)", "dllm_cache(50, 7, ratio=0)", "elastic(beta=4)",
             "elastic(beta=4, gamma=1)"]  # fmt: skip


def layer_promises(monkeypatch: pytest.MonkeyPatch, name: str, spec: str, seed: int) -> None:
    """What the cache answers at every layer: what is read was written there, what changed is
    computed and read."""
    cache = caches.compose(spec)
    before_layer = type(cache).before_layer
    written: dict[tuple[int, int], Any] = {}

    def watched(self: Any, canvas: Canvas, slots: Any, layer: Any) -> Any:
        result = before_layer(self, canvas, slots, layer)
        blank = np.zeros(len(canvas.tokens), np.bool_)
        known = written.setdefault((canvas.prompt_length, layer.index), blank)
        compute = layer.stream if result is None else result
        known[compute] = True
        assert set(slots.waiting(canvas.length)) <= set(compute)
        if result is not None:
            assert known[: canvas.length].all()
        return result

    monkeypatch.setattr(type(cache), "before_layer", watched)
    model = load(name)
    parts = [StaticBlocks(5), Random(), Some(seed), TakeBack(seed)]
    sampler = compose(parts, options={"eos_policy": "none"})
    engine = Decoding(model, sampler, cache, GenerationConfig())
    facts = model.facts
    assert facts.mask_token_id is not None and facts.eos_token_id is not None
    rows = [
        Canvas.for_prompt(
            np.arange(n), 17, mask_id=facts.mask_token_id, pad_id=facts.eos_token_id, noise=noise
        )
        for n in (3, 9)
    ]
    for _ in engine.run(rows):
        pass
    assert written


@pytest.mark.parametrize(("name", "spec"), some(product(MODELS, LAYERWISE), 2))
def test_layers_keep_the_promises(monkeypatch: pytest.MonkeyPatch, name: str, spec: str) -> None:
    for seed in range(3):
        with monkeypatch.context() as patch:
            layer_promises(patch, name, spec, seed)


def test_both_lanes_of_a_guided_row_ask_for_the_attention_of_what_they_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the attention of one lane has turned, the other has not computed more by that."""
    asked, attention = [], View.attention

    def watched(self: View, queries: Any) -> Any:
        asked.append(bool(np.isin(queries, self._piece.now).all()))
        return attention(self, queries)

    monkeypatch.setattr(View, "attention", watched)
    how: dict[str, Any] = {"cfg_scale": 1.0, "max_new_tokens": 32, "sampler": "llada"}
    generate(load("llada-tiny"), [1, 2, 3], cache="elastic(beta=4, gamma=1)", **how)
    assert asked and all(asked)


@pytest.mark.parametrize("ratio", [0, 0.01])
def test_values_are_renewed_where_the_ratio_is_too_small_for_a_position(
    monkeypatch: pytest.MonkeyPatch, ratio: float
) -> None:
    """As in the official code: the prompt, when it is computed, attends to them."""
    renewed, similarity = set[int](), View.value_similarity

    def watched(self: View, positions: Any) -> Any:
        renewed.add(len(positions))
        return similarity(self, positions)

    monkeypatch.setattr(View, "value_similarity", watched)
    cache = f"dllm_cache(1, 3, ratio={ratio}, force_pending=False)"
    generate(load("llada-tiny"), [1, 2, 3], cache=cache, max_new_tokens=8, sampler="llada")
    assert renewed == ({8} if ratio else set())
