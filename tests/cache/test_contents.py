"""What lies in the buffer: written exactly where a step computes, and the same as a fresh run's."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from dllm import cache as caches
from dllm.cache import Plan
from dllm.core.canvas import Canvas
from dllm.core.config import GenerationConfig
from dllm.engine import Row, turn
from dllm.engine.kv import KVBuffer
from dllm.engine.packing import pack
from dllm.engine.rows import Job
from dllm.samplers import compose
from dllm.samplers.scorers import Random
from dllm.samplers.windows import StaticBlocks

from ..decoding import Decoding
from ..settings import EXACT, OWN_MODELS, SMALL
from ..thin import some
from .test_every_pair import MODELS, load
from .test_protocol import Some, TakeBack, noise

STORING = [spec for name, spec in SMALL.items() if name not in ("none", *OWN_MODELS)]
LENGTH = 24


def start(name: str, spec: str) -> tuple[Decoding, Row]:
    """A row under random commits, which are sometimes taken back."""
    model, cache = load(name), caches.compose(spec)
    parts = [StaticBlocks(5), Random(), Some(3)]
    if "greedy" not in spec:
        parts.append(TakeBack(3))
    sampler = compose(parts, options={"eos_policy": "none"})
    engine = Decoding(model, sampler, cache, GenerationConfig())
    assert model.facts.mask_token_id is not None
    canvas = Canvas.for_prompt(
        np.arange(7), LENGTH - 7, mask_id=model.facts.mask_token_id, pad_id=0, noise=noise
    )
    (row,) = engine.open([canvas])
    return engine, row


def held(buffer: KVBuffer | None) -> list[torch.Tensor]:
    """Keys and values of every layer, (heads, slots, head_dim)."""
    assert buffer is not None
    return [layer[0] for layer in (*buffer._keys, *buffer._values) if layer is not None]


PLANNED = [s for s in STORING if not s.startswith("elastic")]  # its layers may compute more


@pytest.mark.parametrize(("name", "spec"), some(product(MODELS, PLANNED), 5))
def test_nothing_is_written_but_what_is_computed(name: str, spec: str) -> None:
    engine, row = start(name, spec)
    before: list[torch.Tensor] = []
    for (step,) in engine.resume([row]):
        after = [x.clone() for x in held(engine.forward.buffer)]
        rest = np.setdiff1d(np.arange(LENGTH), step.plan.compute)
        for old, new in zip(before, after, strict=bool(before)):
            assert torch.equal(old[:, rest], new[:, rest])
        before = after
    assert len(before) == 2 * load(name).hf.config.num_hidden_layers


@pytest.mark.parametrize(
    ("name", "spec"), some(product(MODELS, [s for s in EXACT if "refresh_every=1)" in s]), 3)
)
def test_after_a_remask_keys_and_values_are_those_of_a_fresh_run(name: str, spec: str) -> None:
    engine, row = start(name, spec)
    taken = 0
    tokens = row.canvas.tokens.copy()
    for (step,) in engine.resume([row]):
        fresh, other = start(name, "dual")
        other.canvas.tokens[:] = tokens
        other.canvas.masked[:] = tokens == row.canvas.mask_id
        next(fresh.resume([other]))
        for x, y in zip(held(engine.forward.buffer), held(fresh.forward.buffer), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        tokens, taken = row.canvas.tokens.copy(), taken + len(step.decision.remasked)
    assert taken or "greedy" in spec


@pytest.mark.parametrize("spec", some([s for s in PLANNED if not caches.compose(s).layerwise], 3))
def test_all_that_is_computed_is_written_before_it_is_read(
    spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its slots held before makes no difference."""

    def outcome(poison: bool, patch: pytest.MonkeyPatch) -> Any:
        engine, row = start("llada-tiny", spec)
        plan = turn.plan_of

        def poisoned(row: Row, canvas: Any, cache: Any, targets: Any) -> Any:
            result = plan(row, canvas, cache, targets)
            with torch.inference_mode():
                for x in held(engine.forward.buffer) if poison else ():
                    x[:, result[0].compute] = torch.nan
            return result

        patch.setattr(turn, "plan_of", poisoned)
        logprobs = [step.prediction.logprob for (step,) in engine.resume([row])]
        assert not any(x.isnan().any() for x in held(engine.forward.buffer))
        return row.canvas.tokens.tolist(), np.concatenate(logprobs).tolist()

    with monkeypatch.context() as patch:
        poisoned = outcome(True, patch)
    with monkeypatch.context() as patch:
        assert poisoned == outcome(False, patch)


def test_the_order_of_what_is_computed_and_read_does_not_matter() -> None:
    engine, row = start("llada-tiny", "dual")
    next(engine.resume([row]))
    compute = np.array([8, 9, 11, 14, 20])
    read = np.setdiff1d(np.arange(LENGTH), [3, 17])

    def hidden(order: Any, read: Any) -> torch.Tensor:
        job = Job(row, row.canvas, Plan(compute, read), compute)
        packed = pack([job], 0, LENGTH, torch.device("cpu"))
        assert packed.slots is not None
        packed.ids, packed.positions = packed.ids[:, order], packed.positions[:, order]
        packed.slots = packed.slots[order]
        with torch.inference_mode():
            return engine.forward._backbone(packed, [job])[np.argsort(order)]

    expected = hidden(np.arange(5), read)
    shuffled = hidden(np.array([3, 0, 4, 2, 1]), np.random.default_rng(1).permutation(read))
    torch.testing.assert_close(shuffled, expected, rtol=1e-5, atol=1e-5)
    without = hidden(np.arange(5), read[1:])
    assert (without - expected).abs().max() > 1e-4  # it has power


@pytest.mark.parametrize(("name", "spec"), some(product(MODELS, STORING), 5))
def test_bytes_are_those_of_the_table(name: str, spec: str) -> None:
    """Keys and values of all slots; a hidden state per layer and slot where changes or inputs of
    layers are kept."""
    engine, row = start(name, spec)
    for _ in engine.resume([row]):
        pass
    config = load(name).hf.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slot = 2 * config.num_key_value_heads * head + (engine.cache.keeps is not None) * (
        config.hidden_size
    )
    assert engine.engine.cache_bytes == 4 * config.num_hidden_layers * LENGTH * slot


@pytest.mark.parametrize(("name", "spec"), some(product(MODELS, EXACT), 5))
def test_exact_settings_give_the_logits_of_no_cache(name: str, spec: str) -> None:
    engine, row = start(name, spec)
    steps = engine.resume([row])
    for _ in range(3):
        next(steps)
    _, alone = start(name, "none")
    other = Decoding(load(name), engine.sampler, caches.compose("none"), GenerationConfig())
    alone.canvas = row.canvas
    expected = other.logits(alone)
    torch.testing.assert_close(engine.logits(row), expected, rtol=1e-5, atol=1e-5)
