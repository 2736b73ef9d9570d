"""One read-only forward over a canvas."""

import numpy as np
import pytest
import torch

import dllm
from dllm.core.errors import ConfigError, PromptError
from dllm.request.prompts import encode


def test_a_step_is_the_softmax_of_the_network(tiny: dllm.DiffusionModel) -> None:
    """Against transformers' own forward over the same ids with [MASK] at the holes."""
    prompt, canvas = encode(tiny, "one two"), np.asarray([5, -1, 7, -1, -1])
    mask = tiny.facts.mask_token_id
    assert mask is not None
    ids = np.concatenate([prompt, np.where(canvas < 0, mask, canvas)])
    with torch.inference_mode():
        logits = tiny.hf(input_ids=torch.from_numpy(ids)[None]).logits[0].float()
    wanted = logits.log_softmax(-1)[len(prompt) :][canvas < 0].topk(4)
    out = dllm.step(tiny, canvas, prompt="one two", top=4)
    assert out.positions.tolist() == [1, 3, 4]
    assert (out.tokens == wanted.indices.numpy()).all()
    np.testing.assert_allclose(out.logprobs, wanted.values.numpy(), atol=2e-5)
    again = dllm.step(tiny, canvas, prompt="one two", top=4)
    assert (again.logprobs == out.logprobs).all() and canvas.tolist() == [5, -1, 7, -1, -1]


def test_a_step_over_a_text(tiny: dllm.DiffusionModel) -> None:
    out = dllm.step(tiny, "Tom has [[2]] apples.", top=1)
    assert len(out.positions) == 2 and out.tokens.shape == (2, 1)
    guided = dllm.step(tiny, "Tom has [[2]] apples.", prompt="one", top=1, cfg_scale=1.5)
    assert guided.logprobs.shape == (2, 1)


def test_what_is_no_canvas(tiny: dllm.DiffusionModel) -> None:
    with pytest.raises(PromptError, match="no hole"):
        dllm.step(tiny, "Tom")
    for odd in ("a [[2:[0-9]+]]", "a [[*]] b [[1]]", "[[1]] [[2..4]]"):
        with pytest.raises(PromptError, match="infill takes those"):
            dllm.step(tiny, odd)
    with pytest.raises(PromptError, match="context"):
        dllm.step(tiny, [-1] * 4000)
    for top in (0, True, 10**6):
        with pytest.raises(ConfigError, match="top is"):
            dllm.step(tiny, [-1], top=top)
    with pytest.raises(ConfigError, match="cfg_scale takes a number, not 'x'"):
        dllm.step(tiny, [-1], cfg_scale="x")  # type: ignore[arg-type]
