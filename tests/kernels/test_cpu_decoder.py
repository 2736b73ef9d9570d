"""A decoder layer in one call has its parts' bits; one that is changed is left alone."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import dllm
from dllm.drafting.verifiers.base import recorded
from dllm.engine.kv import KVBuffer
from dllm.kernels.cpu import layers
from dllm.models import DiffusionModel, Segment, decoder
from dllm.models.attention import set_attention
from dllm.models.forwards import CACHE
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
    elif family == "autoregressive":
        hf = MistralForCausalLM(MistralConfig(**{"sliding_window": None} | SIZES | sizes))
    elif family == "a2d_qwen3":
        hf = Qwen3ForCausalLM(Qwen3Config(**{"head_dim": 16} | SIZES | sizes))  # type: ignore[arg-type]
        for layer in hf.model.layers:
            torch.nn.init.normal_(layer.self_attn.q_norm.weight)
            torch.nn.init.normal_(layer.self_attn.k_norm.weight)
    else:
        hf = Qwen2ForCausalLM(Qwen2Config(**SIZES | sizes))  # type: ignore[arg-type]
        for layer in hf.model.layers:
            torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    torch.nn.init.normal_(hf.model.layers[1].input_layernorm.weight)
    model: DiffusionModel = dllm.load(
        hf.to(dtype), family=family, mask_token_id=299, eos_token_id=0
    )
    if family == "autoregressive":
        set_attention(model.hf, "sdpa")  # as verifiers do
    return model


def pieces(n: int) -> list[Segment]:
    """Two ranges, each over all keys."""
    return [Segment(slice(a, b), slice(0, LENGTH)) for a, b in ((0, n // 3), (n // 3, n))]


def hidden(n: int) -> list[Segment]:
    """The same under masks."""
    mask = torch.where(torch.arange(n)[:, None] % 5 == torch.arange(LENGTH) % 5, -1e9, 0.0)[None]
    cut = n // 3
    return [
        Segment(slice(0, cut), slice(0, LENGTH), mask=mask[:, :cut]),
        Segment(slice(cut, n), slice(0, LENGTH), mask=mask[:, cut:]),
    ]


def rows(n: int) -> list[Segment]:
    """Rows in one segment; the last query attends nothing."""
    mask = torch.where(torch.rand(2, n // 2, LENGTH // 2) < 0.3, -torch.inf, 0.0)
    each = slice(0, n // 2 * 2)
    return [Segment(each, slice(0, LENGTH // 2), rows=2, key_stride=LENGTH // 2, mask=mask)]


def chosen(n: int) -> list[Segment]:
    """Keys by name, of one row and of two."""
    keys, cut = torch.tensor([7, 3, 0, 11]), n - n // 3 * 2
    return [
        Segment(slice(0, cut), torch.arange(1, LENGTH, 2)),
        Segment(slice(cut, n), keys, rows=2, key_stride=LENGTH // 2),
    ]


def run(
    model: DiffusionModel, positions: list[int] | None = None,
    attended: Callable[[int], list[Segment]] | None = None,
    scored: Callable[[int], list[int]] | None = None, layers: int = 2, **how: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Hidden states of a whole pass, of a second and of one over ``positions``; keys and values.
    ``attended``: what some number of queries attend, by default all keys; ``scored``: which of so
    many are."""
    ids = torch.randint(0, 250, (LENGTH,), generator=torch.Generator().manual_seed(0))
    buffer, everything, result = KVBuffer(layers, LENGTH), torch.arange(LENGTH), []
    for at in (everything, everything, torch.tensor(positions or [3, 9, 10, 11, 30])):
        torch.manual_seed(0)
        buffer.slots, n = at, len(at)
        segments = attended(n) if attended else [Segment(slice(0, n), slice(0, LENGTH))]
        if scored:
            how["scored"] = torch.tensor(scored(n), dtype=torch.int64)
        with torch.inference_mode():
            result.append(model.backbone(
                ids[at][None], position_ids=at[None], attention_mask=torch.empty(1, 1, 1, 1),
                use_cache=False, segments=segments, **{CACHE: buffer}, **how,
            ).last_hidden_state)  # fmt: skip
    return [*result, *(x for x in (*buffer._keys, *buffer._values) if x is not None)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For every layer that was computed, how many parts it has; 0 for a call that was refused."""
    made, own = list[int](), layers.Layers.__call__

    def counted(*args: Any) -> list[torch.Tensor] | None:
        result: list[torch.Tensor] | None = own(*args)
        made.extend([0] if result is None else [len(args[7])] * args[0].count)
        return result

    monkeypatch.setattr(layers.Layers, "__call__", counted)
    return made


def parts(model: DiffusionModel, **how: Any) -> list[torch.Tensor]:
    """`run` with layers that call their parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "MADE", {})
        patch.setattr(decoder, "_weights", lambda *_: None)
        return run(model, **how)


WAYS: tuple[dict[str, Any], ...] = (
    {}, {"grouped": True}, *({"attended": each} for each in (pieces, hidden, rows, chosen)),
)  # fmt: skip


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llada", "dream", "a2d_qwen3", "autoregressive"])
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
        assert calls == [len(way["attended"](3)) if "attended" in way else 1] * 6
        calls.clear()


SCORED: tuple[Callable[[int], list[int]], ...] = (
    lambda n: [n - 1], lambda n: [0, 2], lambda n: [], lambda n: [*range(n - 1)],
    lambda n: [*range(n - 1, -1, -2)], lambda n: [2, 2],
)  # fmt: skip


@pytest.mark.parametrize("way", [None, "int8", "int4(group=32)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_layer_works_out_what_is_scored(
    dtype: torch.dtype, way: str | None, calls: list[int]
) -> None:
    model = network("dream", dtype, hidden_size=96, intermediate_size=160)
    if way:
        quantise(model.hf, read(way))
    for how in WAYS:
        before = run(model, **how)
        calls.clear()
        for scored in SCORED:
            after = run(model, scored=scored, **how)
            assert len(calls) == 6 and 0 not in calls
            calls.clear()
            for at, n in enumerate((LENGTH, LENGTH, 5)):
                rows = torch.tensor(scored(n), dtype=torch.int64)
                assert torch.equal(after[at][0, rows], before[at][0, rows])
                assert len(rows) > n // 2 or not torch.equal(after[at], before[at])
            assert all(torch.equal(a, b) for a, b in zip(after[3:], before[3:], strict=True))


def test_many_rows_go_layer_by_layer(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LENGTH", 70)
    model, seen = network("llada", torch.float32, num_hidden_layers=3), list[int]()
    before, own = parts(model, layers=3), layers.loaded().dllm_layers
    run(model, layers=3)
    calls.clear()
    made: Any = decoder.MADE[model.hf.model].runs[0].layers
    made.library = SimpleNamespace(
        dllm_layers=lambda *given: (seen.append(given[1]), own(*given))[1]
    )
    after = run(model, layers=3, scored=lambda n: [n - 2])
    assert calls == [1] * 9 and seen == [1, 1, 1] * 2 + [3]
    assert all(torch.equal(a[:, -2], b[:, -2]) for a, b in zip(after, before, strict=True))
    assert not torch.equal(after[0], before[0])


def test_a_row_that_is_not_there_is_not_read(calls: list[int]) -> None:
    model = network("llada", torch.float32)
    before = run(model)
    calls.clear()
    for row in (-1, 100):
        after = run(model, scored=lambda n, row=row: [0, row])  # type: ignore[misc]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert calls == [0] * 6


def test_generation_and_verifiers_ask_for_scored_rows_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, own = list[tuple[int, int | None]](), layers.Layers.__call__

    def counted(*args: Any) -> list[torch.Tensor] | None:
        count, kept = args[1].shape[1], args[10]
        seen.extend([(count, None)] * (args[0].count - 1))
        seen.append((count, None if kept is None else len(kept)))
        result: list[torch.Tensor] | None = own(*args)
        return result

    monkeypatch.setattr(layers.Layers, "__call__", counted)
    model, how = network("llada", torch.float32), {"max_new_tokens": 8, "block_length": 4}
    dllm.generate(model, [1, 2, 3], sampler="llada(steps=4)", **how)
    assert seen == [(11, None), (11, 4), (11, None), (11, 2)] * 2
    seen.clear()
    dllm.generate(model, [1, 2, 3], sampler="llada(steps=4)", cfg_scale=1, **how)
    # of rows without their prompt others are read, too
    assert len(seen) == 8 and not any(kept for _, kept in seen)
    seen.clear()
    hf = LlamaForCausalLM(LlamaConfig(**SIZES))
    verifier = dllm.load(hf, family="autoregressive", eos_token_id=0)
    dllm.speculate(verifier, None, [1, 2, 3], max_new_tokens=2)
    assert seen[2:4] == [(3, None), (3, 1)]  # behind a trial whether texts can be packed


def test_somebody_who_looks_at_the_last_layer_sees_all_rows() -> None:
    model, seen = network("llada", torch.float32), list[torch.Tensor]()
    before = run(model)
    with torch.inference_mode():
        model.hf.model.layers[1].register_forward_hook(lambda *given: seen.append(given[-1]))
    after = run(model, scored=SCORED[0])
    assert len(seen) == 3
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_a_layer_that_somebody_looks_at_runs_alone(calls: list[int]) -> None:
    """Before those behind it; whoever changes its result, asks for all hidden states, or puts
    another layer there gets what is computed now."""
    model, seen = network("dream", torch.float32, num_hidden_layers=4), list[torch.Tensor]()
    stack, before = model.hf.model.layers, run(model, layers=4)
    handle = stack[1].register_forward_hook(lambda *given: seen.append(given[-1]))
    calls.clear()
    after = run(model, layers=4)
    assert calls == [1] * 12 and len(seen) == 3
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    other = stack[1].register_forward_hook(lambda *given: 2 * given[-1])
    changed = run(model, layers=4)
    assert all(torch.equal(a, b) for a, b in zip(changed, parts(model, layers=4), strict=True))
    assert not torch.equal(changed[0], before[0])
    handle.remove()
    other.remove()
    once: Any = stack[1].register_forward_hook(lambda *_: once.remove())  # while it is called
    assert all(torch.equal(a, b) for a, b in zip(run(model, layers=4), before, strict=True))
    calls.clear()
    stack[2] = stack[0]
    assert not torch.equal(run(model, layers=4)[0], before[0]) and calls == [1] * 12
    stack[2].forward = lambda x, **_: x  # as whoever moves layers between devices wraps them
    calls.clear()
    after = run(model, layers=4)
    asked = run(model, layers=4, output_hidden_states=True)
    assert calls == [1] * 6 and all(torch.equal(a, b) for a, b in zip(asked, after, strict=True))


@pytest.mark.parametrize("length", [40, 70])
def test_layers_that_a_drafter_reads_stay_in_one_call(
    length: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until somebody else looks at one of them, too; and are joined once for all drafts."""
    monkeypatch.setitem(globals(), "LENGTH", length)
    model, found = network("llada", torch.float32, num_hidden_layers=4), list[list[torch.Tensor]]()
    stack, read, seen = model.hf.model.layers, (0, 2, 3), list[torch.Tensor]()
    _, made = run(model, layers=4), decoder.MADE[model.hf.model]
    with recorded(model.hf, read) as outputs:
        for way in (parts, run):
            way(model, layers=4, scored=SCORED[0])
            found.append([outputs[i] for i in read])
        assert decoder.MADE[model.hf.model] is made and len(made.runs) == 1 and calls == [1] * 24
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        other = stack[2].register_forward_hook(lambda *given: seen.append(given[-1]))
        run(model, layers=4, scored=SCORED[0])
        assert len(decoder.MADE[model.hf.model].runs) == 3
        assert seen[-1] is outputs[2] and torch.equal(seen[-1], found[0][1])
        other.remove()
    run(model, layers=4)
    assert len(decoder.MADE[model.hf.model].runs) == 1


@pytest.mark.parametrize("way", [None, "int8"])
def test_gates_of_many_rows_go_in_turns(way: str | None, calls: list[int]) -> None:
    """36 of 40 rows, then four: 2 x 36 x 2432 numbers of float32 are what stays in a cache."""
    model = network("llada", torch.float32, hidden_size=96, intermediate_size=2432)
    if way:
        quantise(model.hf, read(way))
    before = parts(model)
    calls.clear()
    assert all(torch.equal(a, b) for a, b in zip(run(model), before, strict=True))
    assert calls == [1] * 6


def test_another_attention_is_left_to_its_function(calls: list[int]) -> None:
    model = network("llada", torch.float32)
    set_attention(model.hf, "eager")  # not exact, as transformers has it
    assert all(torch.equal(a, b) for a, b in zip(run(model), parts(model), strict=True))
    seen: list[torch.Tensor] = []
    set_attention(model.hf, "sdpa")
    run(model, watch=lambda module, q, k: seen.append(q))
    assert len(seen) == 6 and not calls


@pytest.mark.parametrize("way", ["int8", "int4(group=32)"])
@pytest.mark.parametrize("family", ["llada", "dream", "a2d_qwen3", "autoregressive"])
def test_the_bits_of_weights_of_whole_numbers(
    family: str, way: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(family, torch.float32, hidden_size=96, intermediate_size=160)
    quantise(model.hf, read(way))
    for dtype in (torch.float32, torch.bfloat16):  # a cast lays them out anew
        model.hf.to(dtype)  # type: ignore[arg-type]
        before = parts(model, attended=pieces)
        calls.clear()
        after = run(model, attended=pieces)
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        assert calls == [2] * 6
    monkeypatch.setattr("dllm.kernels.quantised.ROWS", 64)
    model.hf.to(torch.float32)  # type: ignore[arg-type]
    before = parts(model)
    assert torch.equal(run(model)[1], before[1]) and calls == [2] * 6  # of weights in pieces


def test_a_row_does_not_know_its_company_or_the_threads() -> None:
    model = network("dream", torch.bfloat16)
    alone, few = (run(model, positions)[2] for positions in ([9], [3, 9, 10, 11, 30]))
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(model)[2], few)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone[0, 0], few[0, 1])


def changed_weight(at: int, layer: Any) -> None:
    with torch.no_grad():
        decoder.PARTS(layer)[at].weight.mul_(2)


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
    [*((partial(changed_weight, at), 6) for at in (2, 8, 10)),
     (moved_norm, 6), (hooked, 3), (wrapped, 3), (adapted, 3)],
)  # fmt: skip
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


def four(model: DiffusionModel, buffer: KVBuffer, keys: Any = slice(0, 4)) -> Any:
    """Hidden states of four positions that attend ``keys``."""
    at = torch.arange(4)
    with torch.inference_mode():
        return model.backbone(
            at[None], position_ids=at[None], attention_mask=torch.empty(1, 1, 1, 1),
            use_cache=False, segments=[Segment(slice(0, 4), keys)], **{CACHE: buffer},
        ).last_hidden_state  # fmt: skip


def test_slots_outside_the_buffer_are_refused() -> None:
    model, buffer = network("llada", torch.float32), KVBuffer(2, 4)
    buffer.slots = torch.arange(4)
    four(model, buffer)
    buffer.slots = torch.arange(1, 5)
    with pytest.raises(IndexError, match="0 to 3"):
        four(model, buffer)


def test_keys_beyond_the_buffer_are_not_read(calls: list[int]) -> None:
    model, results = network("llada", torch.float32), []
    for last in (4, 400):
        buffer = KVBuffer(2, 4)
        buffer.slots = torch.arange(4)
        results.append(four(model, buffer, slice(0, last)))
    assert torch.equal(*results) and calls == [1, 1, 0]
    buffer.slots = torch.arange(4)
    with pytest.raises(IndexError):
        four(model, buffer, torch.tensor([0, 4]))


def test_a_segments_mask_is_that_of_who_asks() -> None:
    segment = Segment(slice(0, 2), slice(0, 3), mask=torch.zeros(1, 2, 3))
    for heads, dtype in ((2, torch.float32), (3, torch.float32), (3, torch.bfloat16)):
        part, mask = segment.part(heads, dtype), segment.folded(heads, dtype)
        assert part is not None and mask is not None and mask is segment.folded(heads, dtype)
        assert mask.shape == (1, 2 * heads, 3) and mask.dtype == dtype
        assert part.mask == mask.data_ptr()
    segment = Segment(slice(0, 2), slice(0, 4), mask=torch.zeros(1, 2, 3))
    assert segment.part(2, torch.float32) is None  # it would be read beyond its end
