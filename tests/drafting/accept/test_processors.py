"""Rules against the exact distribution under temperature, filters and penalties.

The reference processes a distribution with NumPy, token by token; the rules see `Rows` of the same
logits.
"""

import itertools
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.drafting.accept.chains import Block, Greedy, Keyed, Ratio
from dllm.drafting.accept.rows import KeyedNoise, Rows, Sampling
from dllm.drafting.base import AcceptRule, Draft, chain
from dllm.kernels.noise import gumbel
from dllm.kernels.statistics import Filters

from ...thin import some
from .. import toy
from ..conftest import Scripted, make_verifier, prompts
from ..toy import LENGTH, V

SETTINGS = {
    "temperature": Sampling(Filters(0.6)),
    "top_k": Sampling(Filters(1.0, top_k=3)),
    "top_p": Sampling(Filters(1.0, top_p=0.8)),
    "repetition": Sampling(Filters(1.0), repetition_penalty=1.8),
    "all": Sampling(Filters(1.3, top_p=0.9, top_k=4), repetition_penalty=1.5),
}
RULES: dict[str, tuple[AcceptRule, toy.Make]] = {
    "keyed": (Keyed(), toy.sampled),
    "keyed tree": (Keyed(), toy.tree),
    "keyed chain": (Keyed(), toy.argmax),
    "ratio": (Ratio(), toy.sampled),
    "block": (Block(), toy.sampled),
}
FEW, MANY = 1_000, 6_000
TARGET = toy.Target()


def reference(sampling: Sampling, history: tuple[int, ...]) -> np.ndarray:
    """Penalty and temperature; then what both top-p and top-k keep of that distribution."""
    logits = np.log(TARGET.distribution(history))
    for token in set(history):
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] * penalty if logits[token] < 0 else logits[token] / penalty
    distribution = np.exp(logits / sampling.filters.temperature)
    distribution /= distribution.sum()
    order = np.argsort(-distribution)
    before = distribution[order].cumsum() - distribution[order]
    lost = (before > sampling.filters.top_p) | (np.arange(V) >= (sampling.filters.top_k or V))
    distribution[order[lost]] = 0
    return np.asarray(distribution / distribution.sum())


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_are_the_logarithms_of_a_distribution(name: str) -> None:
    history = (1, 3)
    logits = torch.from_numpy(np.log(TARGET.distribution(history)))[None]
    rows = SETTINGS[name].distribution(logits, [np.array(history)], np.array([2]))
    np.testing.assert_allclose(rows[0].exp(), reference(SETTINGS[name], history), atol=1e-6)


@lru_cache
def joint(name: str) -> np.ndarray:
    result = np.zeros((V,) * LENGTH)
    for path in itertools.product(range(V), repeat=LENGTH):
        distributions = [reference(SETTINGS[name], path[:i]) for i in range(LENGTH)]
        result[path] = np.prod(
            [distribution[token] for distribution, token in zip(distributions, path, strict=True)]
        )
    return result


class ToyRows(toy.Coins):
    """Rows of the toy target under ``sampling``."""

    def __init__(
        self, target: toy.Target, draft: Draft, text: tuple[int, ...], rng: Any, seed: int,
        sampling: Sampling,
    ) -> None:  # fmt: skip
        paths = [text, *((*text, *draft.tokens[draft.path(n)]) for n in range(len(draft)))]
        logits = torch.tensor(np.log([TARGET.distribution(tuple(path)) for path in paths]))
        prefix = np.array(text, np.int64)
        super().__init__(logits, draft, prefix, sampling, KeyedNoise(seed), 0)
        self.rng = rng


def p_value(name: str, rule: AcceptRule, make: toy.Make, n: int, rows: type[Rows]) -> float:
    """Of ``n`` texts; 0 where a token was emitted that the filters exclude."""
    sampled = partial(rows, sampling=SETTINGS[name])
    return toy.run(rule.judge, make, n, rows=sampled, joint=joint(name), draws=5).p_value


@pytest.mark.parametrize("case", some(["ratio", "keyed", "block"], 1))
def test_the_distribution_after_processors_is_kept(case: str) -> None:
    assert p_value("all", *RULES[case], FEW, ToyRows) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("case", RULES)
def test_every_rule_with_every_processor(case: str, name: str) -> None:
    assert p_value(name, *RULES[case], MANY, ToyRows) > 1e-4


class LateRows(ToyRows):
    """Fault: the accept test sees the distribution before temperature and penalties, only
    filtered.
    """

    def distribution(self, node: int) -> np.ndarray:
        raw = self.logits[node + 1].exp() * (self.log_distribution[node + 1] > -torch.inf)
        return np.asarray((raw / raw.sum()).numpy())


class ForgetfulRows(ToyRows):
    """Fault: penalties see the committed tokens only, not the drafted ones before the row."""

    def _history(self, node: int) -> np.ndarray:
        return self.prefix


@pytest.mark.slow
@pytest.mark.parametrize(("case", "rows"), some([("ratio", LateRows), ("block", ForgetfulRows)], 1))
def test_a_fault_is_noticed(case: str, rows: type[Rows]) -> None:
    assert p_value("all", *RULES[case], FEW, rows) < 1e-6


DEFAULTS: dict[str, Any] = {
    "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[7], [9, 11]],
    "suppress_tokens": [5, 6, 8], "begin_suppress_tokens": [10, 12], "min_new_tokens": 12,
    "sequence_bias": [[[33], 4.0]], "forced_eos_token_id": 3, "forced_bos_token_id": 21,
    "exponential_decay_length_penalty": (4, 1.2), "encoder_repetition_penalty": 1.3,
    "encoder_no_repeat_ngram_size": 2, "remove_invalid_values": True, "min_length": 18,
    "renormalize_logits": True,
}  # fmt: skip


@pytest.mark.parametrize("name", some(DEFAULTS, 3))
def test_the_verifiers_own_defaults_are_honoured(name: str) -> None:
    """Text and drafted text are those of ``generate`` of transformers, field by field."""
    model = make_verifier("full", seed=5)
    setattr(model.hf.generation_config, name, DEFAULTS[name])
    for prompt in prompts(1, seed=6):
        ids = torch.tensor([prompt])
        hf: Any = model.hf
        theirs = hf.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
        )[0, len(prompt) :].tolist()
        plain = dllm.speculate(model, None, prompt, max_new_tokens=16)
        assert plain.tokens == theirs
        drafter = Scripted([*prompt, *theirs], noise=0.2)
        drafted = dllm.speculate(model, drafter, prompt, controller="full", max_new_tokens=16)
        assert drafted.tokens == theirs


def test_the_call_overrides_the_penalty() -> None:
    model = make_verifier("full", seed=5)
    (prompt,) = prompts(1)
    expected = dllm.speculate(model, None, prompt, max_new_tokens=60).tokens
    model.hf.generation_config.repetition_penalty = 30.0  # type: ignore[union-attr]
    again = dllm.speculate(model, None, prompt, max_new_tokens=60, repetition_penalty=1.0)
    assert again.tokens == expected
    assert dllm.speculate(model, None, prompt, max_new_tokens=60).tokens != expected


@pytest.mark.parametrize(("name", "value"), [("num_beams", 4), ("guidance_scale", 1.5)])
def test_what_cannot_be_honoured_is_refused(name: str, value: Any) -> None:
    model = make_verifier("full")
    setattr(model.hf.generation_config, name, value)
    with pytest.raises(dllm.ConfigError, match=f"sets {name}, which drafting cannot honour"):
        dllm.speculate(model, None, [5, 6, 7], max_new_tokens=4)


@pytest.mark.parametrize("drafter", [None, Scripted(None)])
def test_a_processor_may_write_to_the_scores_it_gets(drafter: Any) -> None:
    def ban(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 100:] = -torch.inf
        return scores

    def how(processor: Any) -> dict[str, Any]:
        return {"logits_processor": [processor], "max_new_tokens": 6, "controller": "full"}

    model, (prompt,) = make_verifier("full"), prompts(1)
    found = dllm.speculate(model, drafter, prompt, **how(ban))
    expected = dllm.speculate(model, None, prompt, **how(lambda ids, x: ban(ids, x.clone())))
    assert found.tokens == expected.tokens and max(found.tokens) < 100
    assert np.allclose(found.logprobs, expected.logprobs, atol=1e-4)  # of what was not banned


def test_a_form_uses_its_last_token() -> None:
    result = dllm.speculate("nano-ar", None, "2 + 3", regex="[0-9]{3}", max_new_tokens=3)
    assert result.text.isdigit() and len(result.text) == len(result.tokens) == 3


def test_what_is_banned_early_is_so_before_its_end() -> None:
    logits = Sampling(early_bans=(1,), early_end=5).distribution(
        torch.zeros(2, 3), [], np.array([4, 5])
    )
    assert logits.isinf().tolist() == [[False, True, False], [False] * 3]


@pytest.mark.parametrize("top_k", [None, 2])
def test_the_noise_of_a_token_is_that_of_its_place(top_k: int | None) -> None:
    draft = Draft(np.array([1, 2]), np.array([-1, 0]))
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(Filters(1.0, top_k=top_k) if top_k else Filters(1.0))
    rows = Rows(logits, draft, np.arange(4), sampling, KeyedNoise(5, 2), 0)
    for node in (-1, 0, 1):
        noise = gumbel(*KeyedNoise(5, 2).emission, 5 + node, 0, np.arange(12))
        assert rows.keyed(node) == int((rows.log_distribution[node + 1].numpy() + noise).argmax())


@pytest.mark.parametrize(("tokens", "asked"), [([1, 2, 2], 1), ([2, 2, 1], 3), ([2, 2, 2], 4)])
@pytest.mark.parametrize("rule", [Greedy(), Keyed()])
def test_rows_behind_a_wrong_token_are_not_worked_out(
    rule: AcceptRule, tokens: list[int], asked: int
) -> None:
    """On a CPU: the filters of a row can take as long as a small network."""
    seen = list[list[int]]()

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    logits = torch.zeros(4, 12).index_fill(1, torch.tensor([2]), 1000)
    sampling = Sampling(Filters(float(isinstance(rule, Keyed))), processors=(processor,))
    draft = chain(np.array(tokens))
    outcome = rule.judge(Rows(logits, draft, np.arange(2), sampling, KeyedNoise(0), 0), draft)
    assert (len(outcome.path), outcome.extra) == (asked - 1, 2)
    assert seen == [[0, 1, *tokens[:n]] for n in range(asked)]


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_one_by_one_are_those_of_other_devices(name: str) -> None:
    """There all are worked out at once."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    logits[2, 5], logits[3] = torch.nan, -torch.inf
    logits[4, [7, 9]] = 9.0  # the lowest id of equals
    draft = Draft(np.array([1, 2, 3, 4, 5]), np.array([-1, 0, 0, 2, 2]))
    for sampling in (SETTINGS[name], Sampling(repetition_penalty=1.5), Sampling()):
        rows = Rows(logits, draft, np.arange(4), sampling, KeyedNoise(0), 0)
        for node in range(-1, 5):
            one = rows._row(node)
            assert torch.equal(one.nan_to_num(), rows.log_distribution[node + 1].nan_to_num())
            assert rows.greedy(node) == rows._best[node + 1]
