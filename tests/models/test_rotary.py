"""Rotation in the buffer is rotation in the layer, to the last bit."""

import copy as copying
from pathlib import Path
from typing import Any

import pytest
import torch

from dllm.engine.kv import KVBuffer
from dllm.kernels.rotation import naive
from dllm.models import DiffusionModel, Segment, load
from dllm.models.forwards import CACHE
from dllm.models.rotary import rotate_in_cache

PREPARED = torch.empty(1, 1, 1, 1)
LENGTH = 40


class Plain(KVBuffer):
    """A buffer that only takes rotated keys."""

    rotate_scatter: Any = property()  # hasattr says no


def step(model: DiffusionModel, buffer: KVBuffer) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and the first layer's keys after a whole pass and one over five positions."""
    ids = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(0))
    for at in (torch.arange(LENGTH), torch.tensor([3, 9, 10, 11, 30])):
        buffer.slots = at
        everything = Segment(slice(0, len(at)), slice(0, LENGTH))
        with torch.inference_mode():
            hidden = model.backbone(
                ids[at][None], position_ids=at[None], attention_mask=PREPARED,
                use_cache=False, segments=[everything], **{CACHE: buffer},
            ).last_hidden_state  # fmt: skip
    keys = buffer._keys[0]
    assert keys is not None
    return hidden, keys


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny"])
def test_the_buffer_rotates_as_the_layer_does(checkpoints: Path, name: str, dtype: str) -> None:
    model = load(checkpoints / name, dtype=dtype)
    layers = model.hf.config.num_hidden_layers
    result, expected = (step(model, kind(layers, LENGTH)) for kind in (KVBuffer, Plain))
    for a, b in zip(result, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_every_layer_goes_through_the_kernel(
    llada: DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, calls = llada.hf.config.num_hidden_layers, []

    def spy(*args: torch.Tensor) -> torch.Tensor:
        calls.append(len(args))
        return naive.rotate_scatter(*args)

    expected, _ = step(llada, KVBuffer(layers, LENGTH))
    monkeypatch.setattr("dllm.engine.kv.rotate_scatter", spy)
    result, _ = step(llada, KVBuffer(layers, LENGTH))
    assert len(calls) == 2 * layers
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_copies_and_wrapped_layers(llada: DiffusionModel) -> None:
    """A copy computes with its own weights, and a forward that somebody wrapped stays wrapped."""
    twin: Any = copying.deepcopy(llada.hf)
    layer = twin.model.layers[0].self_attn
    assert layer.forward.args[0] is layer

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return type(layer).forward(layer, *args, **kwargs)

    layer.forward = wrapped
    rotate_in_cache(twin)
    assert layer.forward is wrapped
