"""The device half against naive forwards of transformers' own model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.samplers import Prediction, Reads, Transform, compose
from dllm.samplers.threshold import Threshold

from ..decoding import Decoding
from ..table import MASK, hashed, table_model


def test_samplers_that_read_the_clean_argmax_get_it_at_any_temperature() -> None:
    table = hashed(4, 2.0)
    for temperature in (0.0, 2.0):
        config = GenerationConfig(max_new_tokens=8, temperature=temperature)
        sampler = compose("threshold(0.3)+r2")
        engine = Decoding(table_model(table), sampler, dllm.cache.compose("none"), config)
        canvas = Canvas.for_prompt(np.array([1, 2]), 8, mask_id=MASK, pad_id=30)
        before, sampled = canvas.tokens.copy(), 0
        for (step,) in engine.run([canvas]):
            p = step.prediction
            logits = table(before, np.arange(10))[p.positions]
            logits[:, MASK] = -np.inf
            likeliest = p.token if p.top_token is None else p.top_token[:, 0]
            assert likeliest.tolist() == logits.argmax(1).tolist()
            sampled += int((p.token != likeliest).sum())
            before = canvas.tokens.copy()
        assert (sampled > 0) is (temperature > 0)


@dataclass(frozen=True)
class Asking(Transform):
    """Reads what stands at decided positions of the window."""

    name = "asking"

    def reads(self, canvas: Canvas) -> Reads:
        low, high = canvas.window
        return Reads((~canvas.masked[low:high]).nonzero()[0] + low, canvas.tokens[:, None])

    def apply(self, canvas: Canvas, prediction: Prediction) -> Prediction:
        return prediction


@pytest.mark.parametrize("filters", [{}, {"temperature": 2.0}, {"temperature": 0.7, "top_p": 0.6},
                                     {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.5},
                                     {"logit_bias": {3: 4.0, 5: -20.0}}])  # fmt: skip
@pytest.mark.parametrize("source", ["clean", "tempered"])
def test_what_parts_ask_for_is_clean_whatever_is_proposed(
    filters: dict[str, Any], source: str
) -> None:
    table = hashed(4, 2.0)
    config = GenerationConfig(max_new_tokens=8, **filters)
    model = table_model(table, score_source=source)
    engine = Decoding(
        model, compose((Asking(), Threshold(float("inf")))), dllm.cache.compose("none"), config
    )
    canvas = Canvas.for_prompt(np.array([1, 2]), 8, mask_id=MASK, pad_id=30)
    before, seen = canvas.tokens.copy(), 0
    for (step,) in engine.run([canvas]):
        at = step.prediction.positions
        at = at[before[at] != MASK]
        logits = torch.from_numpy(table(before, np.arange(10))[at])
        logits[:, MASK] = -torch.inf
        for token, bias in config.logit_bias.items():
            logits[:, token] += bias
        wanted = logits.log_softmax(1).numpy()[np.arange(len(at)), before[at]]
        asked = step.prediction.asked["asking"][before[step.prediction.positions] != MASK, 0]
        assert np.allclose(asked, wanted, atol=1e-5)
        before, seen = canvas.tokens.copy(), seen + len(at)
    assert seen


@pytest.mark.parametrize("cache", ["dllm_cache(6, 3)", "elastic(beta=4)"])
def test_caches_that_decide_by_layer_run_layers_from_disk(
    cache: str, tiny: dllm.DiffusionModel, tiny_folder: Path, tmp_path: Path
) -> None:
    near = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head")
    places = {**dict.fromkeys(near, "cpu"), "model.layers.1": "disk"}
    partly = dllm.load(tiny_folder, device_map=places, offload_folder=str(tmp_path))
    texts = [
        dllm.generate(model, "Tom has", cache=cache, max_new_tokens=12).tokens
        for model in (partly, tiny)
    ]
    assert texts[0] == texts[1]
