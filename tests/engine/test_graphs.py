"""Padded steps of static shape decide what ragged ones do; the capture itself needs a GPU."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.engine import graphs
from dllm.engine.graphs import BUCKETS, Static, Step, bucket
from dllm.engine.kv import KVBuffer
from dllm.engine.packing import Packed
from dllm.models.segments import Segment

from ..thin import some

PROMPT = "Tom has 3 apples."


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 16, 17, 32, 33, 256)] == [16, 16, 32, 32, 64, 256]
    assert bucket(BUCKETS[-1] + 1) is None


def test_the_mask_says_what_segments_read() -> None:
    step = Step.empty(16, 50, torch.device("cpu"), torch.float32)
    segments = [
        Segment(slice(0, 4), slice(2, 7), rows=2, key_stride=10),
        Segment(slice(4, 5), torch.tensor([1, 30])),
        Segment(slice(5, 6), slice(3, 5), mask=torch.tensor([[[-torch.inf, 0.0]]])),
    ]
    numbers = torch.arange(6)
    for _ in range(2):  # what an earlier step left must not stay
        packed = Packed(numbers[None] + 5, numbers[None], numbers + 20, segments, numbers)
        step.fill(packed, 40)
    wanted = np.full((16, 50), -np.inf)
    wanted[0:2, 2:7] = wanted[2:4, 12:17] = 0
    wanted[4, [1, 30]] = wanted[5, 4] = wanted[6:, 40] = 0
    assert np.array_equal(step.mask.numpy(), wanted)
    assert step.ids[0].tolist() == [5, 6, 7, 8, 9, 10] + [0] * 10
    assert step.slots.tolist() == [20, 21, 22, 23, 24, 25] + [40] * 10


@pytest.fixture(autouse=True)
def padding_without_a_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with graphs.uncaptured():
            yield


@pytest.mark.parametrize("cache", some(["dual", "prefix"], 1))
@pytest.mark.parametrize("options", [
    {}, {"temperature": 0.7, "seed": 3}, {"cfg_scale": 0.5}, {"min_new_tokens": 4},
])  # fmt: skip
def test_padded_rows_change_nothing(
    tiny: dllm.DiffusionModel, cache: str, options: dict[str, Any]
) -> None:
    prompts = [PROMPT] if "cfg_scale" in options else [PROMPT, "Sort 3 1 2.", "x"]
    chosen = {"cache": cache, "sampler": "threshold(tau=0.3)", "max_new_tokens": 24,
              "block_length": 8, **options}  # fmt: skip
    plain = dllm.generate(tiny, prompts, **chosen)
    padded = dllm.generate(tiny, prompts, cuda_graphs=True, **chosen)
    for a, b in zip(plain, padded, strict=True):
        assert a.tokens == b.tokens and a.nfe == b.nfe and a.computed == b.computed
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-5)


def test_static_steps_are_used(tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = Static._run

    def spy(self: Static, step: Step) -> torch.Tensor:
        seen.append(len(step.mask))
        return original(self, step)

    monkeypatch.setattr(Static, "_run", spy)
    chosen: dict[str, Any] = {"cache": "dual", "max_new_tokens": 24, "block_length": 8}
    dllm.generate(tiny, [PROMPT], cuda_graphs=True, **chosen)
    assert 16 in seen
    seen.clear()
    dllm.generate(tiny, [PROMPT], **chosen)
    dllm.generate(tiny, ["x"] * (2 * graphs.MOST_KEYS), cuda_graphs=True, **chosen)
    assert not seen


def test_what_padding_leaves_behind_is_not_read(tiny: dllm.DiffusionModel) -> None:
    """Garbage in the scratch slot reaches no real row."""
    layers, result = tiny.hf.config.num_hidden_layers, []
    ids = torch.arange(5, 10)
    for garbage in (0.0, 1e4):
        buffer = KVBuffer(layers, 11)
        static = Static(tiny.backbone, buffer, scratch=10)
        segments = [Segment(slice(0, 5), slice(0, 5))]
        slots = torch.arange(5)
        packed = Packed(ids[None], slots[None], slots, segments, ids)
        with torch.inference_mode():
            static.hidden(packed)
            for held in (*buffer._keys, *buffer._values):
                assert held is not None
                held[:, :, 5:].fill_(garbage)
            hidden = static.hidden(packed)
            assert hidden is not None
            result.append(hidden.clone())
    assert torch.equal(result[0], result[1])


def test_flash_attention_cannot_be_static(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny.hf.config, "_attn_implementation", "dllm_flash_attention_2")
    with pytest.raises(dllm.ConfigError, match="sdpa"):
        dllm.generate(tiny, PROMPT, cache="dual", max_new_tokens=8, cuda_graphs=True)


@pytest.mark.parametrize(("cache", "words"), [("none", "reads none"), ("sparse", "by layer")])
def test_steps_that_read_no_cache_cannot_be_static(cache: str, words: str) -> None:
    with pytest.raises(dllm.ConfigError, match=f"is for steps that read a cache .*{words}"):
        dllm.Session("nano", cuda_graphs=True, cache=cache)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_captured_steps_decide_what_eager_ones_do() -> None:
    model = dllm.load("nano", device="cuda")
    chosen: dict[str, Any] = {"cache": "dual", "max_new_tokens": 64, "block_length": 16}
    plain = dllm.generate(model, [PROMPT], **chosen)
    captured = dllm.generate(model, [PROMPT], cuda_graphs=True, **chosen)
    assert [r.tokens for r in plain] == [r.tokens for r in captured]
