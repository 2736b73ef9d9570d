"""Many texts at a time are each text alone; streams, streamers and threads."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.drafting.base import EMPTY, chain
from dllm.drafting.verifiers.base import layers_of
from dllm.drafting.verifiers.packed import PackedVerifier, open_verifier, packs

from .conftest import ARCHITECTURES, prompts

NEW = 20
FIELDS = ("drafted", "depth", "accepted", "emitted", "extra", "source", "context", "first")


def said(result: dllm.SpeculativeResult) -> tuple[Any, ...]:
    """All of a result that is no measurement."""
    rounds = [tuple(getattr(r, name) for name in FIELDS) for r in result.rounds]
    return result.tokens, result.text, result.finish_reason, result.nfe, result.computed, rounds


def test_packed_where_it_can_be(verifiers: dict[str, dllm.DiffusionModel]) -> None:
    """Windows and attention by hand go row by row; full attention is packed."""
    assert {kind: packs(model) for kind, model in verifiers.items()} == {
        "full": True, "windowed": False, "gqa": False,
    }  # fmt: skip
    assert packs(dllm.load("nano-ar"))


def test_a_single_row_in_8_bits_may_differ() -> None:
    """SmolLM2 in int8 was verified row by row, three times as slowly: one row in ten differed by a
    quarter of the largest logit."""
    own = torch.linspace(-1, 1, 30).reshape(10, 3)
    single, every = own.clone(), own + 0.2
    single[3] += 0.25
    for quantization, fine in ((None, False), ("int8", True)):
        verifier = open_verifier(dllm.load("nano-ar", quantization=quantization))
        assert verifier.agree(own, own) and not verifier.agree(every, own)
        assert verifier.agree(single, own) == fine


def test_one_forward_for_all(verifier: dllm.DiffusionModel) -> None:
    several, calls = prompts(3), []
    assert packs(verifier)  # tried now, so that the trial is not counted
    handle = verifier.hf.register_forward_hook(lambda *_: calls.append(1))
    try:
        results = dllm.speculate(verifier, None, several, max_new_tokens=8)
        assert len(calls) == 8 == results[0].nfe
        calls.clear()
        dllm.speculate(verifier, None, several, max_new_tokens=8, max_batch_size=1)
        assert len(calls) == 24
    finally:
        handle.remove()
    assert verifier.hf.config._attn_implementation == "sdpa", "the model is left as it was"


def test_memory_is_handed_on(verifier: dllm.DiffusionModel) -> None:
    """A finished row's slots are the next one's."""
    model = open_verifier(verifier)
    assert isinstance(model, PackedVerifier)
    sizes = set()
    for prompt in prompts(8):
        text = model.open(np.array(prompt), 40)
        model.score([(text, EMPTY)])
        sizes.add(model.buffer.size)
        model.close(text)
    assert len(sizes) == 1


def test_a_tree_larger_than_its_room_moves(verifier: dllm.DiffusionModel) -> None:
    """More nodes than slots: the text moves to a longer range, and what it keeps with it."""
    (prompt,) = prompts(1)
    model = open_verifier(verifier)
    text, other = model.open(np.array(prompt), 30), model.open(np.array(prompt), 30)
    for one in (text, other):
        model.score([(one, EMPTY)])
        model.commit(one, EMPTY, [], [7])
    many = np.arange(400) % 90
    wide = replace(chain(many), parents=np.full(400, -1))
    rows = model.score([(text, wide), (other, EMPTY)])
    assert torch.allclose(rows[0].logits[0], rows[1].logits[0], atol=1e-4)
    model.commit(text, wide, [3], [int(many[3]), 9])
    model.commit(other, EMPTY, [], [int(many[3])])
    model.score([(other, EMPTY)])
    model.commit(other, EMPTY, [], [9])
    rows = model.score([(text, EMPTY), (other, EMPTY)])
    assert torch.allclose(rows[0].logits, rows[1].logits, atol=1e-4)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_target_layers_are_shown(verifiers: dict[str, dllm.DiffusionModel], kind: str) -> None:
    """Outputs of layers at every fed token, as a forward of the network alone gives them."""
    model = verifiers[kind]
    texts = [np.array(prompt) for prompt in prompts(2, seed=3)]
    verifier = open_verifier(model, target_layer_ids=(0, 1))
    work = [(verifier.open(ids, 40), chain([5, 6])) for ids in texts]
    for (_, hidden), ids in zip(verifier.score(work), texts, strict=True):
        with torch.inference_mode():
            out = model.hf(torch.tensor([[*ids, 5, 6]]), output_hidden_states=True)
        first = out.hidden_states[1][0]
        assert hidden is not None and hidden.shape == (len(ids) + 2, 2 * first.shape[-1])
        assert torch.allclose(hidden[:, : first.shape[-1]], first, atol=1e-4)
    hooks = [len(layer._forward_hooks) for layer in layers_of(model.hf)]
    verifier.score([(verifier.open(texts[0], 40), EMPTY)])
    assert [len(layer._forward_hooks) for layer in layers_of(model.hf)] == hooks


def test_events_are_the_text() -> None:
    """Pieces are never taken back; the last event of a row has its result."""
    model = dllm.load("nano-ar")
    questions = ["Compute 69 + 49.", "Reverse this list: Tom, Anna, Ben", "Compute 1 + 4."]
    how: dict[str, Any] = {"max_new_tokens": 40, "stop_strings": ("Ben",)}
    expected = dllm.speculate(model, "nano", questions, **how)
    texts, tokens, results = [""] * 3, [[], [], []], {}
    for event in dllm.stream_speculate(model, "nano", questions, max_batch_size=2, **how):
        assert event.row not in results, "nothing comes after the last event"
        texts[event.row] += event.text
        tokens[event.row] += event.tokens
        if event.result is not None:
            results[event.row] = event.result
    assert texts == [r.text for r in expected]
    assert tokens == [r.tokens for r in expected]
    assert [results[i].text for i in range(3)] == texts
    assert "Ben" not in texts[1]


def test_a_stream_can_be_given_up(verifier: dllm.DiffusionModel) -> None:
    events = dllm.stream_speculate(verifier, "suffix", prompts(3), max_new_tokens=NEW)
    next(events)
    events.close()  # type: ignore[attr-defined]
    with pytest.raises(dllm.PromptError, match="exceed the context"):  # before the first event
        dllm.stream_speculate(verifier, None, prompts(2), max_new_tokens=1_000)


@pytest.mark.slow
def test_two_threads_with_one_verifier(verifier: dllm.DiffusionModel) -> None:
    several = prompts(4, seed=8)
    expected = [r.tokens for r in dllm.speculate(verifier, None, several, max_new_tokens=NEW)]
    outcome: dict[int, Any] = {}

    def work(number: int) -> None:
        drafter = (None, "prompt_lookup", "suffix", "cacheback")[number]
        results = dllm.speculate(verifier, drafter, several, max_new_tokens=NEW, max_batch_size=3)
        outcome[number] = [r.tokens for r in results]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcome.get(i) for i in range(4)] == [expected] * 4
