"""Speculative output is plain output: greedy and keyed, every architecture, chains and trees."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import dllm
from dllm.drafting.accept.rows import ACCEPT, PURPOSES, RESIDUAL, KeyedNoise
from dllm.drafting.base import EMPTY, Budget, Draft, Drafter, Drafting, DraftRequest
from dllm.drafting.engine import engine_for
from dllm.drafting.recipe import recipe_for
from dllm.drafting.verifiers.packed import PackedVerifier, open_verifier
from dllm.kernels.noise import bits
from dllm.models.forwards import CACHE
from dllm.request.requests import requests_for
from dllm.runtime.scheduler import Scheduler

from ..thin import some
from .conftest import ARCHITECTURES, Scripted, prompts

NEW = 24
EACH = 3  # prompts of a verifier


def plain(model: dllm.DiffusionModel, prompt: list[int], **how: Any) -> dllm.SpeculativeResult:
    result: dllm.SpeculativeResult = dllm.speculate(
        model, None, prompt, **({"max_new_tokens": NEW} | how)
    )
    return result


@pytest.fixture(scope="module")
def expected_texts(
    verifiers: dict[str, dllm.DiffusionModel],
) -> dict[str, list[dllm.SpeculativeResult]]:
    """Plain greedy answers, shared by chains and trees."""
    return {
        kind: [plain(model, prompt, max_new_tokens=16) for prompt in prompts(EACH, seed=1)]
        for kind, model in verifiers.items()
    }


def text_for(model: dllm.DiffusionModel, prompt: list[int], **how: Any) -> list[int]:
    """Prompt and true continuation, further than the test writes."""
    result = plain(model, prompt, **(how | {"max_new_tokens": NEW + 8}))
    return [*prompt, *result.tokens]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_stop_at_the_last_token_is_a_stop(verifier: dllm.DiffusionModel, length: int) -> None:
    """Whether it was drafted, corrected or the extra token."""
    (prompt,) = prompts(1, seed=4)
    tokens = plain(verifier, prompt, max_new_tokens=length).tokens
    model = replace(verifier, facts=replace(verifier.facts, stop_token_ids=(tokens[-1],)))
    expected = plain(model, prompt, max_new_tokens=length)
    assert expected.finish_reason == "stop"
    for noise in (0.0, 0.5, 1.0):
        drafter = Scripted([*prompt, *tokens], noise=noise, seed=length)
        result = dllm.speculate(model, drafter, prompt, controller="full", max_new_tokens=length)
        assert (result.tokens, result.finish_reason) == (expected.tokens, "stop")


@pytest.mark.parametrize(
    ("kind", "tree"), [*((kind, False) for kind in ARCHITECTURES), ("full", True)]
)
def test_greedy_equality(
    verifiers: dict[str, dllm.DiffusionModel],
    expected_texts: dict[str, list[dllm.SpeculativeResult]],
    kind: str,
    tree: bool,
) -> None:
    """Drafts that are right half of the time, so that every accepted length occurs."""
    model, accepted = verifiers[kind], 0
    for i, prompt in enumerate(prompts(EACH, seed=1)):
        expected = expected_texts[kind][i]
        drafter = Scripted([*prompt, *expected.tokens], noise=0.3, tree=tree, seed=i)
        result = dllm.speculate(model, drafter, prompt, controller="full", max_new_tokens=16)
        assert result.tokens == expected.tokens
        assert result.finish_reason == expected.finish_reason
        assert np.allclose(result.logprobs, expected.logprobs, atol=1e-3)
        accepted += result.accepted
    assert accepted > 6 * EACH


def test_plain_decoding_is_what_transformers_does(
    verifiers: dict[str, dllm.DiffusionModel],
) -> None:
    for model in verifiers.values():
        hf: Any = model.hf
        for prompt in prompts(2):
            ids = torch.tensor([prompt])
            theirs = hf.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW
            )
            assert plain(model, prompt).tokens == theirs[0, len(prompt) :].tolist()


WRITTEN = 16
DRAFTERS = ("argmax", "random", "coupled", "adversarial", "right", "tree")


def keyed_prompt(seed: int) -> tuple[list[int], dict[str, Any]]:
    """A prompt and a way to sample: every second seed filters, every third one penalises."""
    (prompt,) = prompts(1, seed=seed)
    how: dict[str, Any] = {"temperature": (0.6, 0.8, 1.0)[seed % 3], "seed": seed}
    how |= {"top_p": 0.95, "top_k": 40} if seed % 2 else {}
    how |= {"repetition_penalty": 1.2} if seed % 3 == 0 else {}
    return prompt, how


@pytest.mark.parametrize("drafter", some(DRAFTERS, 2))
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 112), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_keyed_equality(verifier: dllm.DiffusionModel, drafter: str, seeds: range) -> None:
    """The same seed gives the same tokens, whatever drafts and however many tokens at a time."""
    nano, accepted = dllm.load("nano"), 0
    models = {name: dllm.DiffusionDrafter(nano, search=name, window=6)
              for name in ("argmax", "coupled")}  # fmt: skip
    for seed in seeds:
        prompt, how = keyed_prompt(seed)
        text = [*prompt, *plain(verifier, prompt, max_new_tokens=WRITTEN, **how).tokens]
        scripted = {
            "random": Scripted(None),
            "adversarial": Scripted([(i + 1) % 400 for i in text], noise=0.5, seed=seed),
            "right": Scripted(text),
            "tree": Scripted(text, noise=0.4, tree=True, seed=seed),
        }
        part: Drafter = models[drafter] if drafter in models else scripted[drafter]
        controller = ("fixed(k=4)", "full", "adaptive")[(seed + DRAFTERS.index(drafter)) % 3]
        result = dllm.speculate(
            verifier, part, prompt, controller=controller, max_new_tokens=WRITTEN, **how
        )
        assert result.tokens == text[len(prompt) :]
        accepted += result.accepted
    if drafter in ("right", "tree"):
        assert accepted > 3 * len(seeds)  # `adaptive` drafts what is worth its seconds


def test_an_oracle_is_accepted_whole(verifier: dllm.DiffusionModel) -> None:
    (prompt,) = prompts(1)
    text = text_for(verifier, prompt)
    result = dllm.speculate(
        verifier, Scripted(text, k=3), prompt, controller="full", max_new_tokens=NEW
    )
    assert [r.accepted for r in result.rounds] == [3] * 6
    assert {r.extra for r in result.rounds} == {"bonus"}
    assert result.tokens_per_forward == 4.0
    assert result.survival.tolist() == [1.0, 1.0, 1.0]


def test_a_useless_drafter_costs_no_tokens(verifier: dllm.DiffusionModel) -> None:
    (prompt,) = prompts(1)
    expected = plain(verifier, prompt)
    wrong = Scripted([(i + 1) % 400 for i in text_for(verifier, prompt)])
    result = dllm.speculate(verifier, wrong, prompt, controller="full", max_new_tokens=NEW)
    assert result.tokens == expected.tokens
    assert result.tokens_per_forward == 1.0
    assert result.accepted == 0
    assert {r.extra for r in result.rounds[:-1]} == {"correction"}


@pytest.mark.parametrize(
    ("kind", "tree"), some([*((kind, False) for kind in ARCHITECTURES), ("full", True)], 2)
)
def test_after_a_round_the_cache_is_that_of_a_fresh_prefill(
    verifiers: dict[str, dllm.DiffusionModel], kind: str, tree: bool
) -> None:
    model = verifiers[kind]
    for i, prompt in enumerate(prompts(1, seed=4)):
        text = text_for(model, prompt)
        drafter = Scripted(text, noise=0.4, tree=tree, seed=i)
        run, engine = begun(model, drafter, prompt, controller="full")
        while engine.step():
            length = run.text.cached
            fresh = DynamicCache()
            ids = torch.tensor([run.text.tokens[:length]])
            with torch.inference_mode():
                model.hf(input_ids=ids, use_cache=True, **{CACHE: fresh})
            assert length == len(run.text.tokens) - 1
            if run.canvas.finished:  # its memory is given back
                continue
            for kept, layer in zip(kept_by(run), fresh.layers, strict=True):
                for x, y in zip(kept, (layer.keys, layer.values), strict=True):
                    assert (x[..., :length, :] - y[..., :length, :]).abs().max() < 1e-4


def begun(model: dllm.DiffusionModel, drafter: Drafter, prompt: list[int], **how: Any) -> Any:
    """A text in an engine of its own, before its first round, and the engine."""
    recipe = recipe_for(model, drafter, None, {"max_new_tokens": NEW}, **how)
    requests = requests_for(model, recipe, [prompt])
    scheduler = Scheduler.of(engine_for(model, requests), requests)
    scheduler._admit()
    (run,) = scheduler.running
    return run, scheduler.engine


def kept_by(run: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (1, heads, n, head_dim) of every layer that are kept of a text."""
    if isinstance(run.verifier, PackedVerifier):
        buffer, here = run.verifier.buffer, slice(run.text.base, run.text.base + run.text.size)
        pairs = zip(buffer._keys, buffer._values, strict=True)
        return [(k[:, :, here], v[:, :, here]) for k, v in pairs if k is not None]
    return [(layer.keys, layer.values) for layer in run.text.cache.layers]


def test_a_batch_is_its_rows(verifier: dllm.DiffusionModel) -> None:
    several = prompts(3)
    how: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": NEW}
    together = dllm.speculate(verifier, "prompt_lookup", [*several, several[0]], **how)
    alone = [dllm.speculate(verifier, None, prompt, **how) for prompt in several]
    assert [r.tokens for r in together[:3]] == [r.tokens for r in alone]
    assert together[3].tokens != together[0].tokens  # a second answer to the same prompt


@pytest.mark.parametrize("where", ["accepted", "correction", "bonus"])
def test_a_stop_id_ends_the_text(verifier: dllm.DiffusionModel, where: str) -> None:
    (prompt,) = prompts(1)
    text = text_for(verifier, prompt)
    stop = text[len(prompt) + 4]  # the fifth new token
    first = text.index(stop, len(prompt)) - len(prompt)
    k = {"accepted": 7, "correction": 7, "bonus": first}[where]
    drafted = list(text)
    if where == "correction":
        drafted[len(prompt) + first] = (stop + 1) % 400
    model = replace(verifier, facts=replace(verifier.facts, stop_token_ids=(stop,)))
    result = dllm.speculate(
        model, Scripted(drafted, k=k), prompt, controller="full", max_new_tokens=NEW
    )
    assert result.tokens == text[len(prompt) : len(prompt) + first + 1]
    assert result.finish_reason == "stop"
    assert result.rounds[-1].extra == ("none" if where == "accepted" else where)
    assert result.tokens == plain(model, prompt).tokens


def test_a_drafted_end_does_not_stop_the_verifier(verifier: dllm.DiffusionModel) -> None:
    (prompt,) = prompts(1)
    expected = plain(verifier, prompt)
    ends = [*verifier.facts.stop_token_ids] * 60
    assert expected.finish_reason == "length"
    result = dllm.speculate(verifier, Scripted(ends), prompt, controller="full", max_new_tokens=NEW)
    assert result.tokens == expected.tokens
    assert result.finish_reason == "length"


def test_a_drafter_sees_every_emitted_token(verifier: dllm.DiffusionModel) -> None:
    """Corrections and bonus tokens, too."""
    (prompt,) = prompts(1)
    text = text_for(verifier, prompt)
    seen: list[list[int]] = []

    class Watching(Scripted):
        def open(self, request: DraftRequest) -> Drafting:
            inner = super().open(request)
            propose = inner.propose

            def watched(prefix: np.ndarray, budget: Budget) -> Draft:
                seen.append(prefix.tolist())
                return propose(prefix, budget)

            inner.propose = watched  # type: ignore[method-assign]
            return inner

    result = dllm.speculate(
        verifier, Watching(text, noise=0.3), prompt, controller="full", max_new_tokens=NEW
    )
    assert len(seen) >= result.nfe - 1
    assert all(prefix == text[: len(prefix)] for prefix in seen)
    lengths = len(prompt) + np.cumsum([0, *(r.emitted for r in result.rounds)])
    assert [len(prefix) for prefix in seen] == lengths[: len(seen)].tolist()


def test_every_purpose_and_row_has_noise_of_its_own() -> None:
    """A drafter that shared the accept coins would bias what is accepted."""
    numbers, keys = set(), set()
    for row in range(3):
        coins = KeyedNoise(7, row)
        keys |= {coins.emission, coins.drafting}
        numbers |= {coins.uniform(p, 5, 2, i) for p in (ACCEPT, RESIDUAL) for i in range(3)}
    assert len(keys) == 6 and len(numbers) == 18
    low, high = map(int, bits(7, 2 * PURPOSES + ACCEPT, 5, 2, np.array([2, 3])))  # shared by none
    assert KeyedNoise(7, 2).uniform(ACCEPT, 5, 2, 1) == (high << 20 | low >> 12) * 2**-52 + 2**-53
    streams = {stream for _, stream in keys}
    assert not streams & {row * PURPOSES + p for row in range(3) for p in (ACCEPT, RESIDUAL)}


def test_history_processors_see_the_history_of_their_row(verifier: dllm.DiffusionModel) -> None:
    """Repetition penalty and a custom processor, with full drafts and without any."""

    def no_repeats(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, ids[0, -4:], -torch.inf)

    for i, prompt in enumerate(prompts(1)):
        for how in (
            {"repetition_penalty": 1.7},
            {"logits_processor": [no_repeats]},
            {"temperature": 1.0, "repetition_penalty": 1.2, "top_k": 20, "seed": i},
            {"min_new_tokens": 10},
        ):
            expected = plain(verifier, prompt, **how)
            for tree in (False, True):
                drafter = Scripted([*prompt, *expected.tokens], noise=0.2, tree=tree, seed=i)
                result = dllm.speculate(
                    verifier, drafter, prompt, controller="full", max_new_tokens=NEW, **how
                )
                assert result.tokens == expected.tokens
                assert result.accepted > 0


def test_a_tree_shows_a_node_its_ancestors_only(verifiers: dict[str, dllm.DiffusionModel]) -> None:
    """Every row of a tree forward equals the last row of a forward over its own path; a network
    that cannot score trees says so."""
    drafter = Scripted(None, k=3, tree=True)
    (prompt,) = prompts(1, seed=9)
    for kind in ("windowed", "gqa"):
        with pytest.raises(dllm.ConfigError, match="cannot score a tree"):
            dllm.speculate(verifiers[kind], drafter, prompt, controller="full")
    model = verifiers["full"]
    run, _ = begun(model, drafter, prompt)
    draft = run.drafting.propose(run.prefix, run.controller.next(9, 9))
    rows = run.verifier.score([(run.text, draft)])[0].logits
    for node in range(len(draft)):
        path = [*prompt, *draft.tokens[draft.path(node)].tolist()]
        other = open_verifier(model)
        text = other.open(np.array(path), 99)
        assert torch.allclose(rows[node + 1], other.score([(text, EMPTY)])[0].logits[0], atol=1e-3)
