"""transformers on both routes, and vLLM's interface."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import dllm
from dllm.drafting.bridges.transformers import attach, custom_generate, detach
from dllm.drafting.bridges.vllm import DllmProposer
from dllm.drafting.drafters.suffix import SuffixDecoding
from dllm.drafting.drafters.token_recycling import TokenRecycling
from dllm.drafting.length.rate import Rate

from ..conftest import Scripted, make_verifier, prompts

NEW = 16


def theirs(model: dllm.DiffusionModel, prompt: list[int], **how: Any) -> list[int]:
    ids, hf = torch.tensor([prompt]), model.hf
    how = {"max_new_tokens": NEW, "do_sample": False} | how
    out: Any = hf.generate(ids, attention_mask=torch.ones_like(ids), **how)  # type: ignore[operator]
    result: list[int] = out[0].tolist()
    return result


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_custom_generate_is_greedy_generation(verifier: dllm.DiffusionModel, tree: bool) -> None:
    for i, prompt in enumerate(prompts(3)):
        how: dict[str, Any] = {"repetition_penalty": 1.3} if i else {}
        expected, rounds = theirs(verifier, prompt, **how), []
        drafter = Scripted(expected, k=4, noise=0.2, tree=tree, seed=i)
        result = theirs(
            verifier, prompt, custom_generate=custom_generate, drafter=drafter,
            controller="fixed(k=4)", on_tokens=rounds.append, **how,
        )  # fmt: skip
        assert result == expected
        assert len(rounds) < NEW
        assert [token for tokens in rounds for token in tokens] == expected[len(prompt) :]


def test_custom_generate_samples_as_speculate_does(verifier: dllm.DiffusionModel) -> None:
    (prompt,) = prompts(1)
    how: dict[str, Any] = {
        "do_sample": True, "temperature": 0.7, "top_k": 20, "custom_generate": custom_generate,
        "seed": 5,
    }  # fmt: skip
    plain = theirs(verifier, prompt, **how)
    assert theirs(verifier, prompt, drafter=Scripted(plain, k=3), **how) == plain
    ours = dllm.speculate(
        verifier, None, prompt, temperature=0.7, top_k=20, seed=5, max_new_tokens=NEW
    )
    assert ours.tokens == plain[len(prompt) :]


def test_attached_candidates_leave_greedy_generation_as_it_is(
    verifier: dllm.DiffusionModel,
) -> None:
    for i, prompt in enumerate(prompts(2)):
        expected = theirs(verifier, prompt)
        drafter = Scripted(expected, k=4, noise=0.2, seed=i)
        attach(verifier.hf, drafter, controller="fixed(k=4)")
        try:
            assert theirs(verifier, prompt, prompt_lookup_num_tokens=1) == expected
            sampled = theirs(verifier, prompt, prompt_lookup_num_tokens=1, do_sample=True)
            assert len(sampled) == len(expected)
        finally:
            detach(verifier.hf)
    assert "_get_candidate_generator" not in vars(verifier.hf)


def test_attached_drafters_and_controllers_learn_what_became_of_a_draft(
    verifier: dllm.DiffusionModel,
) -> None:
    """The same as in the loop of `speculate`."""
    prompt = [5, 9, 33, 7]
    tables, fits, texts = [], [], []
    for attached in (False, True):
        table, rate = TokenRecycling(width=4, tree=False), Rate()
        suffix = SuffixDecoding()
        for drafter, controller in ((table, "fixed(k=3)"), (["prompt_lookup", suffix], rate)):
            if not attached:
                dllm.speculate(verifier, drafter, prompt, controller=controller, max_new_tokens=NEW)
                continue
            attach(verifier.hf, drafter, controller=controller)
            theirs(verifier, prompt, prompt_lookup_num_tokens=1)
            detach(verifier.hf)
        tables.append(table.table)
        fits.append(sum(line.sums[0] > 0 for line in rate.verify_seconds.values()))
        texts.append(list(suffix.texts))
    assert tables[0] == tables[1]
    assert fits == [1, 1]  # rounds after the first were timed
    assert texts[0] == texts[1] == [theirs(verifier, prompt)[len(prompt) :]]


def test_bridges_compare_vocabularies(verifier: dllm.DiffusionModel) -> None:
    """As `speculate` does: with tokenizers by what ids mean, without by size."""
    other = make_verifier("full", vocab_size=600)
    nano = dllm.load("nano")
    for model, tokenizer in ((other, None), (verifier, Renamed(nano.tokenizer))):
        with pytest.raises(dllm.ConfigError, match="ids"):
            attach(model.hf, nano, tokenizer=tokenizer)
        assert "_get_candidate_generator" not in vars(model.hf)
    with pytest.raises(dllm.ConfigError, match="ids"):
        theirs(other, [5, 6, 7], custom_generate=custom_generate, drafter=nano)
    attach(verifier.hf, nano, tokenizer=nano.tokenizer)
    detach(verifier.hf)


class Renamed:
    """A tokenizer in which two ordinary tokens have changed places."""

    def __init__(self, tokenizer: Any) -> None:
        self.inner = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, *given: Any, **how: Any) -> Any:
        return self.inner(*given, **how)

    def get_vocab(self) -> dict[str, int]:
        swapped = {100: 101, 101: 100}
        return {t: swapped.get(i, i) for t, i in self.inner.get_vocab().items()}


def test_custom_generate_returns_what_was_asked_for(verifier: dllm.DiffusionModel) -> None:
    ids = torch.tensor([[5, 9, 33, 7]])
    how: dict[str, Any] = {
        "custom_generate": custom_generate, "drafter": "prompt_lookup", "max_new_tokens": 4,
        "do_sample": False, "return_dict_in_generate": True,
    }  # fmt: skip
    hf: Any = verifier.hf
    assert hf.generate(ids, **how).sequences[0].tolist() == theirs(
        verifier, ids[0].tolist(), max_new_tokens=4
    )
    with pytest.raises(dllm.ConfigError, match="output_scores"):
        hf.generate(ids, output_scores=True, **how)


def test_bridges_refuse_what_they_cannot_do(verifier: dllm.DiffusionModel) -> None:
    config = GenerationConfig(max_length=9)
    with pytest.raises(dllm.ConfigError, match="one sequence"):
        custom_generate(verifier.hf, torch.ones(2, 3, dtype=torch.long), generation_config=config)
    with pytest.raises(dllm.ConfigError, match="padding"):
        custom_generate(
            verifier.hf, torch.ones(1, 3, dtype=torch.long), generation_config=config,
            attention_mask=torch.tensor([[0, 1, 1]]),
        )  # fmt: skip
    with pytest.raises(dllm.ConfigError, match="attach"):
        attach(verifier.hf, None)
    with pytest.raises(dllm.ConfigError, match="vLLM"):
        DllmProposer(SimpleNamespace())


def vllm_config(most: int = 4, limit: int = 40) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(max_model_len=limit, get_vocab_size=lambda: 100),
    )


def test_vllm_rows_may_change_places() -> None:
    """State follows the text, not the row; rows that emitted nothing are skipped."""
    proposer = DllmProposer(vllm_config(), drafter="suffix(factor=9.0)")
    proposer.load_model(None)
    a, b = [1, 2, 3, 4, 5, 1, 2], [9, 8, 7, 6, 9, 8]
    table = np.zeros((3, 40), np.int64)
    table[0, :7], table[1, :6], table[2, :3] = a, b, [1, 2, 3]
    assert proposer.propose([[2], [8], []], [7, 6, 3], table) == [[3, 4, 5, 1], [7, 6, 9, 8], []]
    states = list(proposer.states)
    table[0, :7], table[1, :8] = [*b, 7], [*a, 3]
    assert proposer.propose([[7], [3]], [7, 8], table) == [[6, 9, 8, 7], [4, 5, 1, 2]]
    assert {id(s) for s in proposer.states} == {id(s) for s in states}


def test_vllm_states_end_with_their_requests() -> None:
    """What a request wrote is remembered then; rows that skip a step keep their state."""
    proposer = DllmProposer(vllm_config(), drafter="suffix")
    table = np.zeros((2, 40), np.int64)
    table[0, :4], table[1, :3] = [1, 2, 3, 4], [9, 8, 7]
    proposer.propose([[4], [7]], [4, 3], table)
    table[0, 4] = 5
    proposer.propose([[5], []], [5, 3], table)
    assert len(proposer.states) == 2
    table[0, :4] = [9, 8, 7, 6]
    proposer.propose([[6]], [4], table)
    assert [state.tokens.tolist() for state in proposer.states] == [[9, 8, 7, 6]]
    proposer.propose([], [], table)
    assert not proposer.states
    assert list(proposer.drafter.texts) == [[5], [6]]  # type: ignore[attr-defined]


def test_vllm_drafters_learn_what_became_of_a_draft() -> None:
    proposer = DllmProposer(vllm_config(), drafter=Scripted([1, 2, 3, 4, 5, 6, 7, 8], k=3))
    table = np.array([[1, 2, 3, 4, 9, 0, 0, 0]])
    assert proposer.propose([[2]], [2], table) == [[3, 4, 5]]
    proposer.propose([[3, 4, 9]], [5], table)
    drafting: Any = proposer.states[0].drafting
    (feedback,) = drafting.feedback
    assert (feedback.accepted, feedback.emitted) == (2, [3, 4, 9])
    assert feedback.fed.tolist() == [2, 3, 4, 5]


def test_vllm_states_are_as_large_as_their_texts() -> None:
    """Not as the longest text that the model takes."""
    part = Scripted([], k=1)
    proposer = DllmProposer(vllm_config(limit=100_000), drafter=part)
    table = np.tile(np.arange(2_000) % 90, (1, 1))
    limits = []
    for length in range(100, 2_000, 100):
        proposer.propose([[1]], [length], table)
        (state,) = proposer.states
        limits.append(state.limit)
        assert length + 4 < state.limit <= max(512, 2 * (length + 4))
    assert len(set(limits)) == 3


@pytest.mark.parametrize("name", ["arbiter(prompt_lookup+anpd)", "first_of(anpd+remote)"])
def test_vllm_ranks_draft_alike(name: str) -> None:
    config = vllm_config()
    assert DllmProposer(config, drafter=name).drafter.timed
    config.parallel_config = SimpleNamespace(tensor_parallel_size=2)
    with pytest.raises(dllm.ConfigError, match="clock"):
        DllmProposer(config, drafter=name)


def test_vllm_refuses_drafters_that_need_scores() -> None:
    with pytest.raises(dllm.ConfigError, match="token_recycling"):
        DllmProposer(vllm_config(), drafter="first_of(anpd+token_recycling(tree=False))")


def test_vllm_drafts_stay_within_the_length() -> None:
    proposer = DllmProposer(vllm_config(most=4, limit=9), drafter="prompt_lookup")
    table = np.array([[1, 2, 3, 4, 1, 2, 0, 0]])
    assert proposer.propose([[2]], [6], table) == [[3, 4]]
    table = np.array([[1, 2, 3, 4, 1, 2, 1, 2]])
    assert proposer.propose([[2]], [8], table) == [[]]
