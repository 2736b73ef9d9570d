"""A decoder layer in one or two calls has its parts' bits; one that is changed is left alone."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import dllm
from dllm.engine.kv import KVBuffer
from dllm.kernels.cpu import layers
from dllm.models import DiffusionModel, Segment, decoder
from dllm.models.attention import set_attention
from dllm.models.quantisation import quantise, read

pytestmark = pytest.mark.usefixtures("compiled")
LENGTH = 40
SIZES = {
    "vocab_size": 300, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip


def network(family: str, dtype: torch.dtype, **sizes: int) -> DiffusionModel:
    torch.manual_seed(0)
    hf: Any
    if family == "llada":
        hf = LlamaForCausalLM(LlamaConfig(**SIZES | sizes))
    else:
        hf = Qwen2ForCausalLM(Qwen2Config(**SIZES | sizes))  # type: ignore[arg-type]
        for layer in hf.model.layers:
            torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    torch.nn.init.normal_(hf.model.layers[1].input_layernorm.weight)
    model: DiffusionModel = dllm.load(
        hf.to(dtype), family=family, mask_token_id=299, eos_token_id=0
    )
    return model


def run(
    model: DiffusionModel, positions: list[int] | None = None, *, pieces: int = 1,
    hidden: bool = False, **how: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Hidden states of a whole pass, of a second and of one over ``positions``; keys and values.
    Attention is over one range of keys, or that in ``pieces``; ``hidden``: under a mask."""
    ids = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(0))
    buffer, everything, result = KVBuffer(2, LENGTH), torch.arange(LENGTH), []
    for at in (everything, everything, torch.tensor(positions or [3, 9, 10, 11, 30])):
        buffer.slots, n = at, len(at)
        mask = torch.where(at[:, None] % 5 == everything % 5, -1e9, 0.0)[None] if hidden else None
        cuts = [n * i // pieces for i in range(pieces + 1)]
        segments = [
            Segment(slice(a, b), slice(0, LENGTH), mask=None if mask is None else mask[:, a:b])
            for a, b in pairwise(cuts)
        ]
        with torch.inference_mode():
            result.append(model.backbone(
                ids[at][None], position_ids=at[None], attention_mask=torch.empty(1, 1, 1, 1),
                past_key_values=buffer, use_cache=False,
                segments=segments, **how,
            ).last_hidden_state)  # fmt: skip
    return [*result, *(x for x in (*buffer._keys, *buffer._values) if x is not None)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For every layer that the kernels ran, in how many calls."""
    made = list[int]()
    for count, name in ((1, "__call__"), (2, "end")):
        own = getattr(layers.Layer, name)

        def counted(*args: Any, count: int = count, own: Any = own) -> torch.Tensor:
            made.append(count)
            result: torch.Tensor = own(*args)
            return result

        monkeypatch.setattr(layers.Layer, name, counted)
    return made


def parts(model: DiffusionModel, **how: Any) -> list[torch.Tensor]:
    """`run` with layers that call their parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "MADE", {})
        patch.setattr(decoder, "_weights", lambda *_: None)
        return run(model, **how)


WAYS: tuple[dict[str, Any], ...] = (
    {}, {"pieces": 2}, {"hidden": True}, {"hidden": True, "pieces": 2}, {"grouped": True},
)  # fmt: skip


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_bits_of_its_parts(
    family: str, dtype: torch.dtype, exact: bool, calls: list[int]
) -> None:
    model = network(family, dtype)
    if exact:
        set_attention(model.hf, "eager")
    for way in WAYS:
        how = way | {"grouped": True} if exact else way
        before = parts(model, **how)
        assert not calls
        assert all(torch.equal(a, b) for a, b in zip(run(model, **how), before, strict=True))
        assert calls == [way.get("pieces", 1)] * 6
        calls.clear()


def test_another_attention_is_left_to_its_function(calls: list[int]) -> None:
    model = network("llada", torch.float32)
    set_attention(model.hf, "eager")  # not exact, as transformers has it
    assert all(torch.equal(a, b) for a, b in zip(run(model), parts(model), strict=True))
    assert calls == [2] * 6
    seen: list[torch.Tensor] = []
    set_attention(model.hf, "sdpa")
    run(model, watch=lambda module, q, k: seen.append(q))
    assert len(seen) == 6 and calls == [2] * 12


@pytest.mark.parametrize("way", ["int8", "int4(group=32)"])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_bits_of_weights_of_whole_numbers(family: str, way: str, calls: list[int]) -> None:
    model = network(family, torch.float32, hidden_size=96, intermediate_size=160)
    quantise(model.hf, read(way))
    for dtype in (torch.float32, torch.bfloat16):  # a cast lays them out anew
        model.hf.to(dtype)  # type: ignore[arg-type]
        for pieces in (1, 2):
            before = parts(model, pieces=pieces)
            calls.clear()
            after = run(model, pieces=pieces)
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
            assert calls == [pieces] * 6


def test_a_row_does_not_know_its_company_or_the_threads() -> None:
    model = network("dream", torch.bfloat16)
    alone, few = (run(model, positions)[2] for positions in ([9], [3, 9, 10, 11, 30]))
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(model)[2], few)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone[0, 0], few[0, 1])


def changed_weight(layer: Any) -> None:
    with torch.no_grad():
        layer.mlp.up_proj.weight.mul_(2)


def moved_norm(layer: Any) -> None:
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 2


def hooked(layer: Any) -> None:
    layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: output * 2)


def wrapped(layer: Any) -> None:
    own = layer.mlp.forward
    layer.mlp.forward = lambda x: own(x) * 2


def adapted(layer: Any) -> None:
    layer.self_attn.v_proj = torch.nn.Sequential(layer.self_attn.v_proj, torch.nn.Tanh())


@pytest.mark.parametrize(
    ("change", "count"),
    [(changed_weight, 6), (moved_norm, 6), (hooked, 3), (wrapped, 3), (adapted, 3)],
)
def test_what_somebody_changed_counts(
    change: Callable[[Any], None], count: int, calls: list[int]
) -> None:
    model = network("llada", torch.float32)
    before = run(model)
    calls.clear()
    change(model.hf.model.layers[1])
    after = run(model)
    assert len(calls) == count and not torch.equal(before[0], after[0])
    assert all(torch.equal(a, b) for a, b in zip(after, parts(model), strict=True))


def test_a_copy_has_weights_of_its_own(calls: list[int]) -> None:
    model = network("llada", torch.float32)
    before = run(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.hf.model.layers[0].mlp.up_proj.weight.zero_()
    calls.clear()
    assert not torch.equal(run(twin)[1], before[1]) and len(calls) == 6
    assert torch.equal(run(model)[1], before[1])


def test_slots_outside_the_buffer_are_refused() -> None:
    model = network("llada", torch.float32)
    buffer = KVBuffer(2, 4)
    at = torch.arange(4)
    how = {"attention_mask": torch.empty(1, 1, 1, 1), "past_key_values": buffer,
           "use_cache": False, "segments": [Segment(slice(0, 4), slice(0, 4))]}  # fmt: skip
    with torch.inference_mode():
        buffer.slots = at
        model.backbone(at[None], position_ids=at[None], **how)
        buffer.slots = at + 1
        with pytest.raises(IndexError, match="0 to 3"):
            model.backbone(at[None], position_ids=at[None], **how)


def test_keys_beyond_the_buffer_are_not_read(calls: list[int]) -> None:
    model, at = network("llada", torch.float32), torch.arange(4)
    results = []
    for last in (4, 400):
        buffer = KVBuffer(2, 4)
        buffer.slots = at
        with torch.inference_mode():
            results.append(model.backbone(
                at[None], position_ids=at[None], attention_mask=torch.empty(1, 1, 1, 1),
                past_key_values=buffer, use_cache=False,
                segments=[Segment(slice(0, 4), slice(0, last))],
            ).last_hidden_state)  # fmt: skip
    assert torch.equal(*results) and calls[:2] == [1, 1] and 1 not in calls[2:]
