"""Cacheback, the lossy rule: what they draft and keep, by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.core.errors import ConfigError
from dllm.drafting import register_all
from dllm.drafting.accept.apd import AdaptiveParallel
from dllm.drafting.accept.rows import KeyedNoise, Rows, Sampling
from dllm.drafting.base import (
    DRAFTERS,
    EMPTY,
    Budget,
    Draft,
    Drafter,
    Drafting,
    DraftRequest,
    single,
)
from dllm.drafting.base import chain as chain_of
from dllm.drafting.drafters.history import BORDER
from dllm.drafting.drafters.several import FirstOf
from dllm.kernels.statistics.filters import Filters

from ...thin import covering, some
from ..conftest import prompts

register_all()
NEW = 20


def request(prefix: list[int], trees: bool = True) -> DraftRequest:
    return DraftRequest(np.array(prefix), 100, (99,), 200, trees=trees)


@pytest.mark.parametrize(
    ("name", "kind", "temperature"),
    covering(["cacheback", "suffix"], ["full", "windowed"],
             [0.0, 1.0]),
)  # fmt: skip
def test_the_text_is_the_verifiers(
    verifiers: dict[str, dllm.DiffusionModel], kind: str, name: str, temperature: float
) -> None:
    """Whatever they draft, as trees and as chains, after they have learnt from other texts."""
    model, part = verifiers[kind], single(name, DRAFTERS, Drafter)
    how: dict[str, Any] = {"max_new_tokens": NEW, "temperature": temperature, "seed": 2}
    accepted = 0
    for prompt in prompts(2, seed=5):
        expected = dllm.speculate(model, None, prompt, **how).tokens
        for again in range(2):
            result = dllm.speculate(model, part, prompt, controller="full", **how)
            assert result.tokens == expected
            accepted += result.accepted * again
    assert accepted > (10 if kind == "full" else 5)  # they remember the first time; trees find more


def test_cacheback_prefers_what_was_used_last() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 6, 7, 8, 1, 2]
    part = single("cacheback(follower=2, nodes=5)", DRAFTERS, Drafter)
    draft = part.open(request(text)).propose(np.array(text), Budget(9, 9))
    below = [tuple(draft.tokens[draft.path(node)].tolist()) for node in range(len(draft))]
    assert sorted(below) == [(3,), (3, 4), (6,), (6, 7), (6, 7, 8)]  # followers of 1 2, and of 6 7
    chain = part.open(request(text, trees=False)).propose(np.array(text), Budget(3, 9))
    assert chain.is_chain and chain.tokens.tolist() == [6, 7, 8]


def test_cacheback_forgets_what_was_used_longest_ago() -> None:
    part: Any = single("cacheback(leader=1, follower=1, leaders=2, followers=1)", DRAFTERS, Drafter)
    part.learn([1, 2, 3, 1, 4])
    assert {k: list(v) for k, v in part.recent.table.items()} == {(3,): [(1,)], (1,): [(4,)]}


def test_cacheback_takes_in_what_is_new() -> None:
    """Of a text that goes on: not again what was taken in before that of another text."""
    part: Any = single("cacheback(leader=1, follower=1, leaders=3)", DRAFTERS, Drafter)
    for text, known in (([1, 4], 0), ([2, 5], 0), ([1, 4, 6], 2)):
        part.learn(text, known)
    assert list(part.recent.table) == [(1,), (2,), (4,)]


def test_cacheback_uses_what_it_takes_in_again() -> None:
    """Seen again, a leader and a follower are the ones used last."""
    part: Any = single("cacheback(leader=1, follower=1, leaders=2, followers=2)", DRAFTERS, Drafter)
    for pair in ([1, 4], [2, 5], [1, 6], [1, 4], [3, 7]):
        part.learn(pair)
    assert {k: list(v) for k, v in part.recent.table.items()} == {(1,): [(6,), (4,)], (3,): [(7,)]}


@pytest.mark.parametrize("wrong", [{"least": 0.0}, {"least": -1.0}, {"factor": math.inf}])
def test_suffixes_refuse_shares_without_a_logarithm(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="0 < least <= 1"):
        DRAFTERS["suffix"](**wrong)


def test_prompt_lookup_tries_no_ngrams_longer_than_the_text() -> None:
    asked = request([3, 4, 3, 4])
    drafting = single("prompt_lookup(n=1000000000, k=2)", DRAFTERS, Drafter).open(asked)
    assert drafting.propose(asked.prompt, Budget(4, 4)).tokens.tolist() == [3, 4]


def test_suffixes_keep_so_many_outputs() -> None:
    for kept in range(3):
        part: Any = single(f"suffix(requests={kept})", DRAFTERS, Drafter)
        for text in ([1, 2], [3, 4, 5], [6, 7], []):
            part.remember(text)
        last = [[3, 4, 5], [6, 7]][2 - kept :] if kept else []
        history = part.shared
        assert len(part.ends) == kept
        assert history.tokens[history.low :].tolist() == [
            token for text in last for token in [*text, BORDER]
        ]


def test_log_probabilities_are_those_of_the_raw_rows() -> None:
    """In a chain the first rows, in a tree the rows of its nodes; temperature changes nothing."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32))
    expected = logits.double().log_softmax(-1)
    tree = Draft(np.array([1, 2, 3]), np.array([-1, -1, 0]))
    rows = Rows(logits, tree, np.array([0]), Sampling(Filters(0.5)), KeyedNoise(0), 0)
    for nodes, tokens in (([-1, 0, 1], [4, 5, 6]), ([-1, 0, 2], [1, 3, 8]), ([-1, 1], [2, 7])):
        wanted = [
            float(expected[node + 1, token]) for node, token in zip(nodes, tokens, strict=True)
        ]
        assert rows.logprobs(nodes, tokens) == pytest.approx(wanted, abs=1e-5)


def test_what_is_banned_is_not_kept_although_the_first_always_is() -> None:
    logits = torch.zeros(3, 8)
    for row, token in enumerate([1, 2, 3]):
        logits[row, token] = 20.0
    impossible = logits.clone()
    impossible[0, 7] = -math.inf  # in its own row alone
    first = replace(chain_of([7, 2]), log_q=np.zeros((2, 8), np.float32))
    banned = Sampling(bias=((7, -math.inf),))
    for scores, how, kept in (
        (logits, Sampling(), 7), (logits, banned, 1), (impossible, Sampling(), 1),
    ):  # fmt: skip
        rows = Rows(scores, first, np.array([0]), how, KeyedNoise(0), 0)
        outcome = AdaptiveParallel().judge(rows, first)
        assert [*first.tokens[outcome.path], outcome.extra][0] == kept


def test_lossy_rules_say_so() -> None:
    """In the result, in its footer, in the listing; lossless ones do not."""
    how: dict[str, Any] = {"search": "apd", "max_new_tokens": 40}
    prompt = "Write one sentence about Tom."
    plain = dllm.speculate("nano-ar", None, prompt, max_new_tokens=40)
    result = dllm.speculate("nano-ar", "nano", prompt, rule="apd(weight=1)", **how)
    assert result.lossy and result.deviations > 0 and result.tokens != plain.tokens
    assert f"LOSSY rule apd: {result.deviations} tokens are not the verifier's" in result.footer()
    exact = dllm.speculate("nano-ar", "nano", prompt, **how)
    assert not exact.lossy and exact.deviations == 0 and "LOSSY" not in exact.footer()
    from dllm.drafting import available

    named = {part.name: part.summary for part in available() if part.role == "accept rule"}
    assert {name for name, text in named.items() if "LOSSY" in text} == {"apd"}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", some([1.0, 0.0], 1))
def test_two_models_that_share_noise_agree_where_the_drafter_alone_counts(
    temperature: float,
) -> None:
    verifier, drafter = dllm.load("nano-ar"), dllm.load("nano")
    prompt = "Write one sentence about Tom."
    how: dict[str, Any] = {"controller": "fixed(k=6)", "max_new_tokens": 24, "seed": 5,
                           "temperature": temperature, "search": "apd"}  # fmt: skip
    alone = dllm.speculate(verifier, drafter, prompt, rule="apd(weight=1)", **how)
    assert {r.emitted for r in alone.rounds[:-1]} <= {6}
    mixed = dllm.speculate(verifier, drafter, prompt, rule="apd(weight=0.5)", **how)
    assert mixed.lossy and mixed.tokens
    with pytest.raises(dllm.ConfigError, match="search='apd'"):
        dllm.speculate(verifier, drafter, prompt, rule="apd", **how | {"search": "coupled"})


def test_adl_counts_the_raw_draft() -> None:
    """Without an end of text its generated length is what was asked for, though the search may
    have cut the chain."""
    from dllm.drafting.length.lengths import AdaptiveDraftLength

    from ..length.test_control import tell

    adl, other = AdaptiveDraftLength(), AdaptiveDraftLength()
    adl.next(100, 10)
    tell(adl, 12, 12)  # the search made a chain of 12 out of 30
    other.step(30, 12)
    assert adl.next(100, 10).length == other.next(100, 10).length
    adl = AdaptiveDraftLength(k_min=1)
    adl._generated = adl._accepted = 6.0
    adl.step(6, 6)  # all that was drafted was accepted: more
    assert adl.next(100, 10).length == 16
    adl.step(2, 2)  # half of the way from 6 to 2, and ten
    assert adl.next(100, 10).length == 14


@pytest.mark.parametrize("where", ["open", "close"])
def test_a_drafter_that_raises_leaves_none_beside_it_open(where: str) -> None:
    class Faulty(Drafter):
        def open(self, request: DraftRequest) -> Drafting:
            if where == "open":
                raise ZeroDivisionError
            drafting = Drafting()
            drafting.propose = lambda prefix, budget: EMPTY  # type: ignore[method-assign]
            drafting.close = lambda: 1 // 0  # type: ignore[assignment, method-assign]
            return drafting

    for order in (1, -1):
        nano = dllm.DiffusionDrafter("nano")
        both = FirstOf((nano, Faulty())[::order])
        with pytest.raises(ZeroDivisionError):
            dllm.speculate("nano-ar", both, "What is 2 + 3?", max_new_tokens=6)
        assert nano._engine is None, "its keys and values are given back"
