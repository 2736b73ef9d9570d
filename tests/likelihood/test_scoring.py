"""Likelihood bounds: estimators against exact enumeration and against the official procedures."""

from copy import deepcopy
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.likelihood.estimators import ESTIMATORS, llada, stratified
from dllm.likelihood.scoring import Scoring
from dllm.likelihood.tokens import token_scores

PROMPT, TEXT = list(range(40, 52)), list(range(60, 68))


def logits(model: dllm.DiffusionModel, rows: np.ndarray) -> torch.Tensor:
    """(n, N, V) log-probabilities of whole sequences, by the plain model."""
    with torch.inference_mode():
        hf: Any = model.hf
        result: torch.Tensor = hf(torch.from_numpy(rows)).logits.float().log_softmax(-1)
    return result


def bound(model: dllm.DiffusionModel, prompt: list[int], text: list[int]) -> float:
    """The average over all masks, from its definition."""
    length, total, mask = len(text), 0.0, model.facts.mask_token_id
    for k in range(1, length + 1):
        subsets = list(combinations(range(length), k))
        for chosen in subsets:
            row = np.array(prompt + text)
            row[[len(prompt) + i for i in chosen]] = mask
            result = logits(model, row[None])[0]
            terms = [float(result[len(prompt) + i, text[i]]) for i in chosen]
            total += sum(terms) * length / k / length / len(subsets)
    return total


def test_blocks_are_scored_behind_clean_ones() -> None:
    """As a model learns it whose attention is causal between blocks; two of them begin here."""
    model = dllm.load("tests/golden/data/llada2-tiny")
    size, mask = model.facts.block_length, model.facts.mask_token_id
    assert size is not None
    ids, start, hf, total = list(range(40, 42 + size)), size - 3, model.hf, 0.0
    where = torch.arange(len(ids))
    unseen = where[:, None] // size < where // size
    for positions in (range(start, size), range(size, len(ids))):
        for k in range(1, len(positions) + 1):
            subsets = list(combinations(positions, k))
            for chosen in subsets:
                row = torch.tensor(ids)
                row[list(chosen)] = mask
                seen = torch.zeros(unseen.shape).masked_fill(unseen, -1e30)[None, None]
                with torch.inference_mode():
                    result: Any = hf(row[None], attention_mask=seen).logits[0].log_softmax(-1)
                total += sum(float(result[i, ids[i]]) for i in chosen) / k / len(subsets)
    ours = dllm.score(model, ids[:start], ids[start:], greedy=True)
    assert ours.logprob == pytest.approx(total, rel=1e-4)
    assert (ours.stderr, ours.nfe, ours.tokens, ours.greedy) == (0.0, 7 + 3, 5, False)


def test_blocks_share_the_samples() -> None:
    model = dllm.load("tests/golden/data/llada2-tiny")
    size = model.facts.block_length or 0
    text = [40 + i % 60 for i in range(3 * size)]
    result = [dllm.score(model, text[:4], text[4:], samples=24, seed=i) for i in range(12)]
    assert {one.nfe for one in result} == {24}
    spread = np.std([one.logprob for one in result], ddof=1)
    claimed = np.sqrt(np.mean([one.stderr**2 for one in result]))
    assert 0.5 * spread < claimed < 2.5 * spread
    rivals = dllm.score(model, text[:4], [text[4:], text[:40]], samples=64, early_stop=True)
    assert all(one.stderr < np.inf for one in rivals)
    for cfg in (0.0, 0.7):  # of which the second lane sees the blocks before, and no prompt
        out = dllm.generate(model, text[:4], sampler="llada", max_new_tokens=size + 8,
                            eos_policy="none", suppress_mask=False, cfg_scale=cfg)  # fmt: skip
        ours = dllm.score(model, text[:4], out.tokens, samples=4, greedy=True, cfg_scale=cfg)
        assert ours.greedy


@pytest.mark.parametrize("length", [1, 2, 5])
def test_short_continuations_are_exact(tiny: dllm.DiffusionModel, length: int) -> None:
    result = dllm.score(tiny, PROMPT, TEXT[:length])
    assert result.logprob == pytest.approx(bound(tiny, PROMPT, TEXT[:length]), rel=1e-5)
    assert (result.stderr, result.nfe) == (0.0, 2**length - 1)


def test_the_stratified_estimate_and_its_error_are_honest(tiny: dllm.DiffusionModel) -> None:
    exact = dllm.score(tiny, PROMPT, TEXT[:6])
    result = [dllm.score(tiny, PROMPT, TEXT[:6], samples=24, seed=i) for i in range(40)]
    means = np.array([s.logprob for s in result])
    spread = means.std(ddof=1)
    assert abs(means.mean() - exact.logprob) < 4 * spread / np.sqrt(len(means))
    claimed = np.sqrt(np.mean([s.stderr**2 for s in result]))
    assert 0.7 * spread < claimed < 2.5 * spread


@pytest.mark.parametrize("length", [8, 16, 33])
@pytest.mark.parametrize("rows", [7, 32, 64])
def test_every_number_of_masks_is_as_likely(length: int, rows: int) -> None:
    result = [stratified(length, 3, rows, (seed, 0)) for seed in range(600)]
    counts = np.concatenate([draws.masked.sum(1) for draws in result])
    share = np.bincount(counts, minlength=length + 1)[1:] / len(counts)
    assert share == pytest.approx(np.full(length, 1 / length), abs=5 / np.sqrt(len(counts)))
    where = np.concatenate([draws.masked for draws in result]).mean(0)
    assert where == pytest.approx(np.full(length, where.mean()), abs=5 / np.sqrt(len(counts)))
    weights = result[0].weight / (length / result[0].masked.sum(1) / rows)[:, None]
    assert weights == pytest.approx(result[0].masked.astype(float))


def test_the_official_estimator_prefers_even_numbers_of_masks() -> None:
    counts = np.concatenate([llada(16, 3, 32, (seed, 0)).masked.sum(1) for seed in range(400)])
    assert (counts % 2 == 0).mean() > 0.6
    ours = np.concatenate([stratified(16, 3, 32, (seed, 0)).masked.sum(1) for seed in range(400)])
    assert 0.48 < (ours % 2 == 0).mean() < 0.52


def test_parity_with_the_official_estimator(tiny: dllm.DiffusionModel) -> None:
    """The published procedure, step by step, under torch's global seed."""
    torch.manual_seed(5)
    batch, length, losses = 32, len(TEXT), []
    sequence = np.array(PROMPT + TEXT)
    for _ in range(2):
        k = torch.randint(1, length + 1, ())
        x = torch.round(torch.linspace(float(k), k + (batch - 1) * (length / batch), steps=batch))
        x = ((x.long() - 1) % length) + 1
        hide = torch.arange(length).repeat(batch, 1) < x[:, None]
        for i in range(batch):
            hide[i] = hide[i][torch.randperm(length)]
        rows = np.repeat(sequence[None], batch, 0)
        rows[:, len(PROMPT) :][hide.numpy()] = tiny.facts.mask_token_id
        result = logits(tiny, rows)[:, len(PROMPT) :]
        picked = result.gather(2, torch.tensor(TEXT).repeat(batch, 1)[..., None])[..., 0]
        losses.append(float((picked * hide / (x / length)[:, None]).sum() / batch))
    ours = dllm.score(tiny, PROMPT, TEXT, estimator="llada", samples=64, seed=5)
    assert ours.logprob == pytest.approx(np.mean(losses), rel=1e-5)


def test_parity_with_dreams_estimator() -> None:
    model = dllm.load("tests/golden/data/dream-tiny")
    prompt, text = PROMPT, [*TEXT, model.facts.eos_token_id]
    torch.manual_seed(3)
    rows, size = 16, len(prompt) + len(text)
    t = (1 - 1e-3) * ((torch.rand(1) + torch.arange(rows).float() / rows) % 1) + 1e-3
    hide = torch.rand((rows, size)) < t[:, None]
    hide[:, 0] = hide[:, -1] = False
    hide[:, : len(prompt)] = False
    noisy = np.repeat(np.array(prompt + text)[None], rows, 0)
    noisy[hide.numpy()] = model.facts.mask_token_id
    result = logits(model, noisy)
    result = torch.cat([result[:, :1], result[:, :-1]], 1)
    picked = result.gather(2, torch.tensor(prompt + text).repeat(rows, 1)[..., None])[..., 0]
    expected = float((picked * hide / t[:, None]).sum() / rows)
    ours = dllm.score(model, prompt, TEXT, estimator="dream", samples=rows, seed=3)
    assert ours.logprob == pytest.approx(expected, rel=1e-4)


def test_the_chain_rule_has_one_forward_per_position(tiny: dllm.DiffusionModel) -> None:
    expected = 0.0
    for i, token in enumerate(TEXT):
        row = np.array(PROMPT + TEXT)
        row[len(PROMPT) + i :] = tiny.facts.mask_token_id
        expected += float(logits(tiny, row[None])[0, len(PROMPT) + i, token])
    ours = dllm.score(tiny, PROMPT, TEXT, estimator="left_to_right")
    assert ours.logprob == pytest.approx(expected, rel=1e-5)
    assert (ours.stderr, ours.nfe) == (0.0, len(TEXT))
    back = dllm.score(tiny, PROMPT, TEXT, estimator="right_to_left")
    assert back.logprob != pytest.approx(ours.logprob, rel=1e-3)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_batch_equals_its_requests_alone(tiny: dllm.DiffusionModel, name: str) -> None:
    texts = [TEXT, TEXT[::-1], TEXT[:3]]
    prompts = [PROMPT, PROMPT[:4], PROMPT]
    how = {"estimator": name, "samples": 32, "greedy": True}
    together = dllm.score(tiny, prompts, texts, **how)
    small = dllm.score(tiny, prompts, texts, **how, max_batch_tokens=50)
    for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        alone = dllm.score(tiny, prompt, text, **how)
        for result in (together[i], small[i]):
            assert result.logprob == pytest.approx(alone.logprob, rel=1e-5)
            assert (result.nfe, result.greedy) == (alone.nfe, alone.greedy)


def test_greedy_continuations_are_recognised(tiny: dllm.DiffusionModel) -> None:
    out = dllm.generate(
        tiny, PROMPT, sampler="llada+whole", max_new_tokens=6, eos_policy="none",
        suppress_mask=False,
    )  # fmt: skip
    text = out.sequences[len(PROMPT) :].tolist()
    assert dllm.score(tiny, PROMPT, text, greedy=True).greedy is True
    other = [*text[:-1], (text[-1] + 1) % tiny.facts.vocab_size]
    assert dllm.score(tiny, PROMPT, other, greedy=True).greedy is False
    assert dllm.score(tiny, PROMPT, text).greedy is None


@pytest.mark.parametrize("samples", [8, 40, 64])
def test_early_stop_takes_all_samples_where_nothing_is_decided(samples: int) -> None:
    """One continuation has no rival, so no round is the last before its time."""
    text = "Anna, Tom, Ben, Mia, Zoe, Kate, Paul"
    result = dllm.score("nano", "Copy this list: Tom", text, samples=samples, early_stop=True)
    assert result.nfe == samples


@pytest.mark.slow
def test_early_stop_saves_forwards_and_keeps_the_ranking() -> None:
    prompt = "Reverse this list: Tom, Anna, Ben, Mia, Zoe"
    texts = ["Zoe, Mia, Ben, Anna, Tom", "Zoe, Mia, Ben, Tom, Anna", "Tom, Anna, Ben, Mia, Zoe"]
    full = dllm.score("nano", prompt, texts, samples=64)
    quick = dllm.score("nano", prompt, texts, samples=64, early_stop=True)
    assert [s.nfe for s in full] == [64] * 3
    assert sum(s.nfe for s in quick) <= 130
    assert full[0].logprob == max(s.logprob for s in full)
    assert quick[0].logprob == max(s.logprob for s in quick)
    for slow, fast in zip(full, quick, strict=True):
        assert abs(slow.logprob - fast.logprob) < 5 * np.hypot(slow.stderr, fast.stderr)


def test_guidance_mixes_logits(tiny: dllm.DiffusionModel) -> None:
    mask = tiny.facts.mask_token_id
    assert mask is not None
    given, without = np.array([*PROMPT, mask]), np.full(len(PROMPT) + 1, mask)
    with torch.inference_mode():
        hf: Any = tiny.hf
        a, b = hf(torch.from_numpy(np.stack([given, without]))).logits[:, -1].float()
    expected = float((b + 2.5 * (a - b)).log_softmax(-1)[60])
    assert dllm.score(tiny, PROMPT, [60], cfg_scale=1.5).logprob == pytest.approx(
        expected, rel=1e-4
    )


def causal() -> dllm.DiffusionModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=80, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5,
    )  # fmt: skip
    return dllm.load(Qwen2ForCausalLM(config))


def test_autoregressive_models_are_scored_exactly() -> None:
    model = causal()
    result = dllm.score(model, PROMPT, TEXT)
    rows = logits(model, np.array(PROMPT + TEXT)[None])[0]
    expected = sum(float(rows[len(PROMPT) + i - 1, t]) for i, t in enumerate(TEXT))
    assert result.logprob == pytest.approx(expected, rel=1e-5)
    assert (result.stderr, result.nfe, result.greedy) == (0.0, 1, False)
    for vain in ({"cfg_scale": 1.5}, {"estimator": "llada"}):
        with pytest.raises(dllm.ConfigError, match="leave estimator and cfg_scale out"):
            dllm.score(model, PROMPT, TEXT, **vain)


def test_no_logits_of_a_prompt_are_held() -> None:
    model, sizes = causal(), []
    head: Any = model.hf.get_output_embeddings()
    head.register_forward_hook(lambda module, given, out: sizes.append(out.shape[1]))
    assert dllm.score(model, PROMPT * 4, TEXT).tokens == len(TEXT)
    assert sizes == [len(TEXT)]


def test_logits_that_a_network_scales_or_caps_are_scored_as_it_gives_them() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5,
    }  # fmt: skip
    for network in (
        Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=3.0)),
        GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=8.0)),
    ):
        model, ids = dllm.load(network), np.array(PROMPT + TEXT)
        rows = logits(model, ids[None])[0, :-1]
        expected = rows[torch.arange(len(rows)), torch.from_numpy(ids[1:])].numpy()
        total = float(expected[len(PROMPT) - 1 :].sum())
        assert dllm.score(model, PROMPT, TEXT).logprob == pytest.approx(total, rel=1e-5)
        scored = token_scores(model, ids, 1, Scoring())
        np.testing.assert_allclose(scored.logprobs[1:], expected, rtol=1e-5)


def test_texts_continue_prompts(tiny: dllm.DiffusionModel) -> None:
    right, wrong = dllm.score("nano", "Reverse this list: Tom, Anna", ["Anna, Tom", "Tom, Anna"])
    assert right.logprob > wrong.logprob
    empty = dllm.score(tiny, "", "Tom")
    assert empty.tokens > 0 and empty.logprob < 0
    assert dllm.score(tiny, None, "Tom") == empty
    message = {"role": "user", "content": "Reverse this list: Tom, Anna"}
    assert dllm.score("nano", message, "Anna, Tom") == right
    numbers = [np.int64(5), np.int64(6)]
    assert dllm.score(tiny, numbers, "Tom") == dllm.score(tiny, [5, 6], "Tom")
    with pytest.raises(dllm.PromptError, match="token ids, not 5"):
        dllm.score(tiny, 5, "Tom")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"estimator": "lada"}, "did you mean 'llada'"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"estimator": "dream", "seed": 2**64}, "seed must lie between 0 and"),
        ({"chat": 1}, "chat is True, False or None, not 1"),
        ({"before_forward": 3}, "before_forward is a function, not 3"),
        ({"sample": 5}, "did you mean 'samples'"),
        ({"estimator": "llada", "samples": 33}, "a multiple of 32"),
    ],
)
def test_bad_settings(tiny: dllm.DiffusionModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(dllm.DllmError, match=message):
        dllm.score(tiny, PROMPT, TEXT, **arguments)


def test_bad_texts(tiny: dllm.DiffusionModel) -> None:
    with pytest.raises(dllm.PromptError, match="nothing to score"):
        dllm.score(tiny, PROMPT, "")
    with pytest.raises(dllm.PromptError, match="context"):
        dllm.score(tiny, PROMPT * 10, TEXT * 3)
    with pytest.raises(dllm.PromptError, match="2 prompts do not go with 3"):
        dllm.score(tiny, [PROMPT, PROMPT], [TEXT] * 3)


def test_a_caller_can_end_a_call(tiny: dllm.DiffusionModel) -> None:
    """What it raises before a forward comes out; with greedy decoding and exact scores, too."""
    calls: list[int] = []

    def count(most: int) -> None:
        calls.append(1)
        if len(calls) > most:
            raise KeyboardInterrupt

    some: list[dict[str, Any]] = [{"max_batch_tokens": 40}, {"greedy": True, "samples": 1}]
    for model, how in ((tiny, some[0]), (tiny, some[1]), (causal(), {})):
        calls.clear()
        result = dllm.score(model, PROMPT, TEXT, before_forward=lambda: count(10_000), **how)
        forwards = len(calls)
        assert forwards >= max(1, result.nfe // 2)  # packed, two at a time
        for most in {0, forwards - 1}:
            calls.clear()
            with pytest.raises(KeyboardInterrupt):
                dllm.score(model, PROMPT, TEXT, before_forward=partial(count, most), **how)
            assert len(calls) == most + 1


@pytest.mark.parametrize("shape", ["masked", "autoregressive"])
def test_broken_weights_have_no_likelihood(tiny: dllm.DiffusionModel, shape: str) -> None:
    model = deepcopy(tiny) if shape == "masked" else causal()
    with torch.no_grad():
        next(model.hf.parameters())[PROMPT[0], 0] = torch.nan
    with pytest.raises(dllm.NumericError, match="a likelihood is no number: the weights hold NaN"):
        dllm.score(model, PROMPT, TEXT)
