"""Block-causal models, and the exact cache that only they allow."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import dllm
from dllm.cache import Plan, Slots
from dllm.cache.base import full_plan
from dllm.cache.none import NoCache
from dllm.core.canvas import Canvas
from dllm.engine.layers import View
from dllm.engine.packing import pack
from dllm.engine.recipe import MaskedRecipe, RowOptions
from dllm.engine.rows import Job, Row
from dllm.engine.visibility import Visibility
from dllm.kernels.statistics import Filters

from ..decoding import replayed
from ..thin import some

MASK, GRID = 63, 4
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 60,
}  # fmt: skip
OFFICIAL = {"rope_theta": 1e6, "mask_token_id": MASK, "pad_token_id": 60, "attention_bias": False}
FAMILIES = {
    "sdar": ("SDARForCausalLM", "block_size", Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "fast_dllm_v2": ("Fast_dLLM_QwenForCausalLM", "bd_size", Qwen2ForCausalLM, Qwen2Config, {}),
}
PROMPTS = [[5, 9, 17, 40, 3, 8], [7], [10, 23, 54, 54, 1, 9, 33, 20, 14, 15, 8, 2]]
SAMPLERS = ["llada", "llada(remasking=random)", "threshold(0.05)", "llada+whole",
            "threshold(0.03)+blocks(3)", "dream(alg=entropy)"]  # fmt: skip


SHIFTED = pytest.param("fast_dllm_v2", marks=pytest.mark.slow)
both = pytest.mark.parametrize("folder", sorted(FAMILIES), indirect=True, scope="module")


@pytest.fixture(scope="module", params=["sdar", SHIFTED])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in the official layout."""
    name, field, network, config, more = FAMILIES[request.param]
    torch.manual_seed(1)
    hf = network(
        config(**SHAPE, **more, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    )
    with torch.no_grad():
        for weight in hf.parameters():
            weight.mul_(4)
    path = tmp_path_factory.mktemp(request.param)
    save_file(hf.state_dict(), path / "model.safetensors", metadata={"format": "pt"})
    official = {**SHAPE, **OFFICIAL, **more, "architectures": [name], field: GRID}
    (path / "config.json").write_text(json.dumps(official))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> dllm.DiffusionModel:
    return dllm.load(folder)


def run(model: dllm.DiffusionModel, prompts: Any, sampler: str, cache: str, **more: Any) -> Any:
    return dllm.generate(model, prompts, sampler=sampler, cache=cache, max_new_tokens=17,
                         eos_policy="none", trace=True, **more)  # fmt: skip


@both
def test_without_a_cache_steps_are_the_masked_forward(model: dllm.DiffusionModel) -> None:
    out = run(model, PROMPTS[0], "llada", "none", steps=17)
    canvas = torch.tensor([PROMPTS[0] + [MASK] * 17])
    for step in out.trace.steps:
        with torch.inference_mode():
            logits = model.hf(canvas).logits[0]
            logits[:, MASK] = -torch.inf
        for position, token, logprob in step.commits:
            row = logits[max(0, position - model.facts.logit_shift)].log_softmax(-1)
            assert int(row.argmax()) == token
            assert float(row[token]) == pytest.approx(logprob, abs=1e-5)
            canvas[0, position] = token


@pytest.mark.parametrize("sampler", some(SAMPLERS, 1))
def test_the_block_cache_is_exact(model: dllm.DiffusionModel, sampler: str) -> None:
    exact, reference = (run(model, PROMPTS, sampler, cache) for cache in ("block", "none"))
    for one, other in zip(exact, reference, strict=True):
        assert replayed(one) == replayed(other)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    alone = [run(model, prompt, sampler, "block") for prompt in PROMPTS]
    assert [replayed(r) for r in alone] == [replayed(r) for r in exact]


def test_it_computes_two_blocks_at_most(model: dllm.DiffusionModel) -> None:
    out = run(model, PROMPTS[2], "llada", "block")
    sizes = [step.computed for step in out.trace.steps]
    shift = model.facts.logit_shift
    assert sizes[0] == 16
    assert max(sizes[1:]) <= 2 * GRID + shift
    assert sizes.count(GRID + shift) + sizes.count(GRID) > len(sizes) / 2
    assert out.trace.steps[0].window == (12, 16)
    assert out.computed < run(model, PROMPTS[2], "llada", "none").computed / 2


def test_other_caches_run_and_bidirectional_models_refuse_it(
    model: dllm.DiffusionModel, folder: Path
) -> None:
    run(model, PROMPTS, "llada", "dual")
    run(model, PROMPTS, "llada", "dllm_cache(4, 2)")
    golden = Path(__file__).resolve().parents[1] / "golden" / "data" / "llada-tiny"
    with pytest.raises(dllm.ConfigError, match="block needs block-causal attention"):
        run(dllm.load(golden), PROMPTS[0], "llada", "block")
    config = json.loads((folder / "config.json").read_text())
    assert {"block_size", "bd_size"} & set(config)


LAYERWISE = ["dllm_cache(4, 2)", "elastic(beta=4)"]


@pytest.mark.parametrize("cache", some(LAYERWISE, 1))
def test_layers_report_the_attention_that_is_computed(
    model: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """Nothing of later blocks."""
    attention, calls = View.attention, []

    def rows(self: View, queries: Any) -> Any:
        result = attention(self, queries)
        later = np.arange(result.shape[1]) // GRID > queries[:, None] // GRID
        assert not result[later].any()
        assert result.sum(1) == pytest.approx(1, abs=1e-5)
        calls.append(later.any())
        return result

    monkeypatch.setattr(View, "attention", rows)
    run(model, PROMPTS, "llada", cache)
    assert any(calls) or cache.startswith("dllm_cache")


@pytest.mark.parametrize("cache", some(["dllm_cache(1, 1)", "elastic(refresh_every=1)"], 1))
def test_layerwise_caches_have_their_exact_settings_here_too(
    model: dllm.DiffusionModel, cache: str
) -> None:
    exact, reference = (run(model, PROMPTS, "llada", how) for how in (cache, "none"))
    for one, other in zip(exact, reference, strict=True):
        assert replayed(one) == replayed(other)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_masks_fed_again_see_no_later_block() -> None:
    canvas = Canvas.for_prompt(np.arange(4), 8, mask_id=MASK, pad_id=60)
    recipe, plan = MaskedRecipe(dllm.samplers.compose("s2d2")), Plan(np.arange(12), refresh=True)
    options = RowOptions((), 0, Filters(), 0, frozenset())
    row = Row(canvas, recipe, options, Slots.empty(12, 0, GRID), canvas)
    again = np.array([5, 9])
    job = Job(row, canvas, plan, canvas.masks(), masks=again, ordered=(4, 12))
    packed = pack([job], 0, False, torch.device("cpu"), Visibility(GRID))
    *_, mask = [segment.mask for segment in packed.segments if segment.mask is not None]
    at = np.concatenate([np.arange(12), again])
    seen = [at[np.isfinite(keys)].tolist() for keys in mask[0].numpy()]
    assert seen == [[0, 1, 2, 3, 4, 5], [*range(9), 9]]


@both
@pytest.mark.parametrize("cfg_scale", [0.0, 0.7])
def test_likelihoods_see_the_blocks_that_decoding_sees(
    model: dllm.DiffusionModel, cfg_scale: float
) -> None:
    """The chain rule from left to right, against the dense network, whose attention is
    block-causal."""
    prompt, text = PROMPTS[0], PROMPTS[2][:7]
    given = len(prompt)

    def logprobs(masked: range) -> torch.Tensor:
        """(V,) at the first of the masked offsets, guided by a lane without the prompt."""
        rows = torch.tensor([prompt + text, [MASK] * given + text])
        rows[:, [given + i for i in masked]] = MASK
        with torch.inference_mode():
            lanes = model.hf(rows).logits.double()[:, given + masked[0] - model.facts.logit_shift]
        return (lanes[1] + (cfg_scale + 1) * (lanes[0] - lanes[1])).log_softmax(-1)

    expected = sum(float(logprobs(range(i, len(text)))[text[i]]) for i in range(len(text)))
    result = dllm.score(model, prompt, text, estimator="left_to_right", cfg_scale=cfg_scale)
    assert result.logprob == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("sampler", "cache"), some([("threshold(0.05)", "block"), ("llada", "none")], 1)
)
def test_append_is_the_largest_canvas_cut_at_the_stop(
    model: dllm.DiffusionModel, sampler: str, cache: str
) -> None:
    """Tokens, order, forwards and log-probabilities, with an end of text and without one."""
    how: dict[str, Any] = {"sampler": sampler, "cache": cache, "max_new_tokens": 33}
    free = dllm.generate(model, PROMPTS, eos_policy="none", **how)
    stop = free[0].tokens[14]
    ending = replace(model, facts=replace(model.facts, stop_token_ids=(stop,)))
    for one in (model, ending):
        whole = dllm.generate(one, PROMPTS, **how)
        found = dllm.generate(one, PROMPTS, length="append", **how)
        for a, b in zip(whole, found, strict=True):
            assert (a.tokens, a.order, a.finish_reason) == (b.tokens, b.order, b.finish_reason)
            assert a.nfe == b.nfe and np.array_equal(a.logprobs, b.logprobs)
            assert b.canvas <= 33 and b.computed <= a.computed
    assert found[0].finish_reason == "stop" and found[0].canvas < 33


@pytest.mark.slow
def test_an_answer_ends_where_its_text_does_by_default(model: dllm.DiffusionModel) -> None:
    """No length named: block after block up to the context, as on the largest canvas; where the
    blocks are others, or something plans for one length, 128 positions as elsewhere."""
    how: dict[str, Any] = {"sampler": "threshold(0.05)", "cache": "block"}
    context = model.facts.context_length
    free = dllm.generate(model, PROMPTS[0], eos_policy="none", max_new_tokens=80, **how)
    early = free.tokens[20], free.tokens[70]
    for stop in early:
        ending = replace(model, facts=replace(model.facts, stop_token_ids=(stop,)))
        whole = dllm.generate(ending, PROMPTS[0], max_new_tokens=context - 6, **how)
        found = dllm.generate(ending, PROMPTS[0], **how)
        assert outcome_of(found) == outcome_of(whole) and found.canvas < len(found.tokens) + 5
    for more in ({"length": "fixed"}, {"block_length": 8}):
        assert dllm.generate(model, PROMPTS[1], **how | {"cache": "none"} | more).canvas == 128


def outcome_of(result: dllm.Result) -> tuple[Any, ...]:
    return result.tokens, result.order, result.nfe, result.finish_reason, result.logprobs.tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler", some(["lopa(d2f(0.05), k=3)+staged_blocks(4)", "lopa(d2f(0.05), k=3)"], 1)
)
def test_branches_may_open_a_later_block(
    model: dllm.DiffusionModel, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial moves the window of its branch on: each branch computes as far as its own reaches."""
    how: Any = {"temperature": 2.0, "block_length": 4}
    plain = [run(model, PROMPTS, sampler, "none", seed=seed, **how) for seed in range(6)]
    monkeypatch.setattr(NoCache, "plan", lambda self, canvas, slots, targets: full_plan(canvas))
    for seed, results in enumerate(plain):
        whole = run(model, PROMPTS, sampler, "none", seed=seed, **how)
        for one, other in zip(results, whole, strict=True):
            assert (one.tokens, one.nfe) == (other.tokens, other.nfe)
            assert one.computed < other.computed
