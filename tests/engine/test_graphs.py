"""Padded steps of static shape decide what ragged ones do; the capture itself needs a GPU."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.cache import CACHES
from dllm.engine import graphs
from dllm.engine.graphs import Static, Step, bucket, check_static
from dllm.engine.kv import KVBuffer, Scratch
from dllm.engine.packing import Packed
from dllm.models.attention import VARLEN
from dllm.models.segments import Segment
from dllm.models.varlen import Spans, Varlen

from ..thin import some

PROMPT = "Tom has 3 apples."


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 16, 17, 33, 129, 300, 1025)] == [16, 16, 32, 48, 160, 320, 1280]


def test_padding_is_rows_that_read_the_scratch_slot() -> None:
    cpu, numbers = torch.device("cpu"), torch.arange(6)
    segments = [
        Segment(slice(0, 4), slice(2, 7), rows=2, key_stride=10),
        Segment(slice(4, 5), torch.tensor([1, 30])), Segment(slice(5, 6), slice(3, 5)),
    ]  # fmt: skip
    gathered = Step.empty(16, 16, 2, 32, KVBuffer(1, 50), cpu)
    apart = Step.empty(16, 16, 2, 0, KVBuffer(1, 50), cpu)
    ranges = [segments[0], Segment(slice(4, 6), slice(9))]
    for step, read in ((gathered, segments), (apart, ranges)):
        spans = Spans.of(read, 50, cpu)
        assert spans is not None
        for slots in (numbers + 9, numbers + 20):  # what an earlier step left must not stay
            step.fill(Packed(numbers[None], numbers[None], slots, read, numbers), spans, 40)
        assert step.slots.tolist() == [20, 21, 22, 23, 24, 25] + [40] * 10
    ends, own = gathered.borders.queries.tolist(), gathered.borders
    assert ends == [0, 2, 4, 5, 6, 8, 10, 12, 14] + [16] * 8
    assert own.used is not None and own.used.tolist() == [5, 5, 2, 2] + [1] * 12
    assert own.index is not None and own.index.tolist() == [
        *range(2, 7), *range(12, 17), 1, 30, 3, 4, *[40] * 18,
    ]  # fmt: skip
    assert own.keys.tolist() == [0, 5, 10, 12] + [14] * 13
    assert apart.borders.index is None and apart.borders.used is not None
    assert apart.borders.keys.tolist() == [2, 12, 0] + [40] * 14
    assert apart.borders.used.tolist() == [5, 5, 9] + [1] * 13


@pytest.fixture(autouse=True)
def padding_without_a_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu"):
        yield
    else:
        with graphs.uncaptured():
            yield


@pytest.mark.parametrize(("cache", "options"), some(product(
    ["dual", "none", "prefix", "dkv", "window_diffusion"],
    [{}, {"temperature": 0.7, "seed": 3}, {"cfg_scale": 0.5}, {"min_new_tokens": 4}],
), 3))  # fmt: skip
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
        seen.append(len(step.slots))
        return original(self, step)

    monkeypatch.setattr(Static, "_run", spy)
    chosen: dict[str, Any] = {"cache": "dual", "max_new_tokens": 24, "block_length": 8}
    dllm.generate(tiny, [PROMPT], cuda_graphs=True, **chosen)
    assert 16 in seen
    seen.clear()
    dllm.generate(tiny, [PROMPT], **chosen)
    monkeypatch.setattr(graphs, "MOST", 7)
    dllm.generate(tiny, [PROMPT], cuda_graphs=True, **chosen)
    assert not seen


def test_a_session_meets_its_shapes_before_its_requests() -> None:
    with dllm.Session(
        "nano", cache="dual", cuda_graphs=True, max_batch_size=3, max_positions=600
    ) as session:
        static = session._scheduler.engine.forward.static
        assert static is not None and static.buffer is not None
        met = {shape: step.met for shape, step in static.steps.items()}
        blocks = {(32, 1, 32, 0), (64, 2, 32, 0), (96, 4, 32, 0)}  # of 1, 2, 3 rows
        assert all(met[shape] == 3 for shape in blocks)
        size, how = static.buffer.size, {"block_length": 32, "max_new_tokens": 64}
        for handle in [session.submit(PROMPT, sampler="llada(steps=8)", **how) for _ in range(3)]:
            handle.result()
        assert static.buffer.size == size and met.keys() <= static.steps.keys()
        assert any(static.steps[shape].met > met[shape] for shape in blocks)


def test_a_session_starts_where_no_whole_block_fits() -> None:
    model = dllm.load("nano")
    short = replace(model, facts=replace(model.facts, context_length=20))
    how = {"max_new_tokens": 8, "block_length": 8}
    with dllm.Session(short, cache="dual", cuda_graphs=True, max_batch_size=2) as session:
        text = session.submit([5, 6], **how).result().text
    assert text == dllm.generate(short, [[5, 6]], cache="dual", **how)[0].text


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


def test_a_kernel_that_takes_no_offsets_cannot_be_static(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VARLEN, "flash_attention_2", Varlen("flash_attn", lambda q, k, v: q))
    monkeypatch.setattr(tiny.hf.config, "_attn_implementation", "dllm_flash_attention_2")
    with pytest.raises(dllm.ConfigError, match="sdpa"):
        dllm.generate(tiny, PROMPT, cache="dual", max_new_tokens=8, cuda_graphs=True)


def test_a_model_on_two_devices_cannot_be_static(tiny: dllm.DiffusionModel) -> None:
    network = deepcopy(tiny.hf)
    network.model.layers[1].to("meta")
    with pytest.raises(dllm.ConfigError, match="on one GPU"):
        check_static(CACHES["dual"](), network.model)


def test_keys_that_are_not_kept_follow_their_layer_to_its_device() -> None:
    scratch = Scratch(3, torch.device("cpu"))
    for device in ("cpu", "meta", "cpu"):
        states = torch.ones(1, 2, 3, 4, device=device)
        assert {x.device for x in scratch.place(0, states)} == {states.device}


def test_steps_that_stop_at_every_layer_cannot_be_static() -> None:
    with pytest.raises(dllm.ConfigError, match="'elastic' works layer by layer"):
        dllm.Session("nano", cuda_graphs=True, cache="elastic")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(
    "cache", ["none", "dual", "prefix", "dkv", "window_diffusion", "dpad", "vicinity"]
)
def test_captured_steps_decide_what_eager_ones_do(cache: str) -> None:
    model = dllm.load("nano", device="cuda", dtype="bfloat16")
    chosen: dict[str, Any] = {"cache": cache, "max_new_tokens": 64, "block_length": 16}
    prompts = [PROMPT, "What is 23 + 12?", "Reverse this list: Tom, Anna, Ben"]
    plain = dllm.generate(model, prompts, **chosen)
    captured = dllm.generate(model, prompts, cuda_graphs=True, **chosen)
    assert [r.text for r in plain] == [r.text for r in captured]
    with pytest.raises(dllm.ConfigError, match="bfloat16"):
        dllm.Session(dllm.load("nano", device="cuda", dtype="float32"), cuda_graphs=True)
