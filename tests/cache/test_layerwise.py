"""What caches that decide at every layer promise there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dllm import cache as caches
from dllm.canvas import Canvas
from dllm.config import GenerationConfig
from dllm.engine.layers import LayerHook
from dllm.samplers import compose
from dllm.samplers.scorers import Random
from dllm.samplers.windows import StaticBlocks

from ..decoding import Decoding
from .test_every_pair import MODELS, load
from .test_protocol import Some, TakeBack, noise

LAYERWISE = ["dllm_cache(6, 3)", "dllm_cache(50, 7, ratio=0)", "sparse", "d2(k=4)",
             "elastic(beta=4)", "elastic(beta=4, gamma=1)"]  # fmt: skip


def layer_promises(monkeypatch: pytest.MonkeyPatch, name: str, spec: str, seed: int) -> None:
    """At every layer: what is read was written there, what changed is computed and read."""
    ask: Any = LayerHook._ask
    written: dict[tuple[int, int], Any] = {}

    def asked(hook: LayerHook) -> bool:
        result: bool = ask(hook)
        for piece in hook.pieces:
            canvas, slots = piece.job.row.canvas, piece.job.row.slots
            blank = np.zeros(len(canvas.tokens), np.bool_)
            known = written.setdefault((piece.base, hook.index), blank)
            compute = piece.now.compute
            known[compute] = True
            read = np.arange(canvas.length) if piece.now.read is None else piece.now.read
            assert known[read].all()
            assert set(slots.waiting(canvas.length)) <= set(compute) <= set(read)
        return result

    monkeypatch.setattr(LayerHook, "_ask", asked)
    model = load(name)
    parts = [StaticBlocks(5), Random(), Some(seed), TakeBack(seed)]
    sampler = compose(parts, options={"eos_policy": "none"})
    engine = Decoding(model, sampler, caches.compose(spec), GenerationConfig())
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


@pytest.mark.parametrize("spec", LAYERWISE)
@pytest.mark.parametrize("name", MODELS)
def test_layers_keep_the_promises(monkeypatch: pytest.MonkeyPatch, name: str, spec: str) -> None:
    for seed in range(3):
        with monkeypatch.context() as patch:
            layer_promises(patch, name, spec, seed)
