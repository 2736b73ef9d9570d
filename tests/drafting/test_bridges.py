"""transformers on both routes, vLLM's interface, and a drafter in another thread over HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import dllm
from dllm.drafting.api import make_drafter
from dllm.drafting.base import Budget, Draft, Drafter, Drafting, Request
from dllm.drafting.bridges.remote import Service, serve
from dllm.drafting.bridges.transformers import attach, custom_generate, detach
from dllm.drafting.bridges.vllm import DllmProposer
from dllm.drafting.vocabulary import fingerprint

from .conftest import Scripted, prompts

NEW = 16


def theirs(model: dllm.DiffusionModel, prompt: list[int], **how: Any) -> list[int]:
    ids, hf = torch.tensor([prompt]), model.hf
    how = {"max_new_tokens": NEW, "do_sample": False} | how
    out: Any = hf.generate(ids, attention_mask=torch.ones_like(ids), **how)  # type: ignore[operator]
    found: list[int] = out[0].tolist()
    return found


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_custom_generate_is_greedy_generation(verifier: dllm.DiffusionModel, tree: bool) -> None:
    for i, prompt in enumerate(prompts(3)):
        how: dict[str, Any] = {"repetition_penalty": 1.3} if i else {}
        expected, rounds = theirs(verifier, prompt, **how), []
        drafter = Scripted(expected, k=4, noise=0.2, tree=tree, seed=i)
        found = theirs(
            verifier, prompt, custom_generate=custom_generate, drafter=drafter,
            controller="fixed(k=4)", on_tokens=rounds.append, **how,
        )  # fmt: skip
        assert found == expected
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


def test_vllm_drafts_stay_within_the_length() -> None:
    proposer = DllmProposer(vllm_config(most=4, limit=9), drafter="prompt_lookup")
    table = np.array([[1, 2, 3, 4, 1, 2, 0, 0]])
    assert proposer.propose([[2]], [6], table) == [[3, 4]]
    table = np.array([[1, 2, 3, 4, 1, 2, 1, 2]])
    assert proposer.propose([[2]], [8], table) == [[]]


class Slow(Drafter):
    """Waits, or fails, before it drafts."""

    def __init__(self, inner: Any, seconds: float = 0.0) -> None:
        self.inner, self.seconds = inner, seconds

    def open(self, request: Request) -> Drafting:
        drafting, part = self.inner.open(request), self

        class One(Drafting):
            def propose(self, prefix: np.ndarray, budget: Budget) -> Draft:
                time.sleep(part.seconds)
                found: Draft = drafting.propose(prefix, budget)
                return found

        return One()


@pytest.fixture
def served() -> Iterator[Any]:
    servers = []

    def start(drafter: Any, vocabulary: str = "") -> tuple[str, Any]:
        server = serve(Service(drafter, vocabulary))
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}", server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_remote_drafter_drafts(
    verifier: dllm.DiffusionModel, served: Any, temperature: float
) -> None:
    (prompt,) = prompts(1)
    how: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "seed": 2}
    plain = dllm.speculate(verifier, None, prompt, **how)
    print_ = fingerprint(verifier.tokenizer, verifier.facts.vocab_size)
    url, server = served(Scripted([*prompt, *plain.tokens], k=3), print_)
    found = dllm.speculate(
        verifier, f"remote(url={url!r}, deadline=20)", prompt, controller="fixed(k=3)", **how
    )
    assert found.tokens == plain.tokens
    assert found.nfe == NEW // 4
    assert {r.source for r in found.rounds} == {"remote"}
    del server


def test_a_drafter_that_is_gone_or_late_costs_nothing_but_time(
    verifier: dllm.DiffusionModel, served: Any
) -> None:
    (prompt,) = prompts(1)
    plain = dllm.speculate(verifier, None, prompt, max_new_tokens=NEW)
    url, _ = served(Slow(make_drafter("prompt_lookup"), 0.5))
    for address in (url, "http://127.0.0.1:9"):
        spec = f"remote(url={address!r}, deadline=0.05, patience=2, rest=60)"
        found = dllm.speculate(verifier, spec, prompt, controller="fixed(k=3)", max_new_tokens=NEW)
        assert found.tokens == plain.tokens
        assert found.drafted == 0


def test_another_vocabulary_is_refused(verifier: dllm.DiffusionModel, served: Any) -> None:
    url, _ = served(make_drafter("prompt_lookup"), "of another model")
    with pytest.raises(dllm.ConfigError, match="vocabular"):
        dllm.speculate(
            verifier, f"remote(url={url!r}, deadline=20)", [5, 6, 7], controller="fixed(k=3)",
            max_new_tokens=4,
        )  # fmt: skip


def test_stale_and_malformed_replies_are_no_drafts() -> None:
    part: Any = make_drafter("remote")
    drafting = part.open(Request(np.array([1]), 50, (), 20))
    budget = Budget(4, 4)
    assert len(drafting._checked({"base_len": 3, "tokens": [1, 2]}, 3, budget)) == 2
    assert len(drafting._checked({"base_len": 2, "tokens": [1, 2]}, 3, budget)) == 0
    assert len(drafting._checked({"base_len": 3, "tokens": [1, 50]}, 3, budget)) == 0
    bad = {"base_len": 3, "tokens": [1, 2], "parents": [0, -1]}
    assert len(drafting._checked(bad, 3, budget)) == 0
