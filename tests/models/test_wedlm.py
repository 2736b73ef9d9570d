"""WeDLM: causal attention over decided tokens, then masks; every promise against the plain network
of transformers, which is fed the reordered text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm import cache as caches
from dllm.cache import Slots
from dllm.cache.base import full_plan
from dllm.core.canvas import Canvas
from dllm.engine import Engine, MaskedRecipe, graphs
from dllm.engine.forward import Forward
from dllm.engine.recipe import RowOptions
from dllm.engine.rows import Job, Row
from dllm.models.forwards import CACHE
from dllm.samplers import compose
from dllm.samplers.scorers import Random
from dllm.samplers.windows import StaticBlocks, WholeRegion

from ..cache.test_protocol import Some, TakeBack, noise
from ..decoding import Decoding, replayed
from ..thin import covering, some
from .wedlm import EOS, FAMILIES, MASK, network, reordered_logits, write

PROMPTS = [[5, 9, 17, 40, 3, 8], [7], [10, 23, 54, 54, 1, 9, 33, 20, 14, 15, 8, 2]]
SAMPLERS = ["wedlm", "wedlm(3.0, penalty=0.05)", "llada(remasking=random)", "threshold(0.05)",
            "llada+whole", "threshold(0.03)+blocks(3)", "lopa(k=3)",
            "freedave(draft_depth=3)"]  # fmt: skip
HOLES = [-1, 5, -1, -1, 40, 9, -1, 3, -1, -1, -1, 8, 8]


QWEN2 = pytest.param("wedlm_qwen2", marks=pytest.mark.slow)
both = pytest.mark.parametrize("folder", sorted(FAMILIES), indirect=True, scope="module")


@pytest.fixture(scope="module", params=["wedlm", QWEN2])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / str(request.param)
    write(path, request.param)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> dllm.DiffusionModel:
    return dllm.load(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return network(folder.name)


def run(model: dllm.DiffusionModel, prompts: Any, sampler: str, cache: str, **more: Any) -> Any:
    options = {"max_new_tokens": 33, "eos_policy": "none", **more}
    return dllm.generate(model, prompts, sampler=sampler, cache=cache, trace=True, **options)


@both
def test_a_checkpoint_is_told_by_its_norms(model: dllm.DiffusionModel, folder: Path) -> None:
    facts = model.facts
    assert model.family.name == folder.name and type(model.hf) is FAMILIES[folder.name][0]
    assert (facts.mask_kind, facts.logit_shift, facts.block_length) == ("decided_first", 0, None)
    assert (facts.mask_token_id, facts.eos_token_id) == (MASK, EOS)


@both
def test_the_network_alone_is_the_causal_one(model: dllm.DiffusionModel, reference: Any) -> None:
    ids = torch.randint(0, 60, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, theirs = model.hf(ids).logits, reference(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@both
@pytest.mark.parametrize("length", [40, 700])
def test_a_forward_is_that_of_the_reordered_text(
    model: dllm.DiffusionModel, reference: Any, length: int
) -> None:
    """Any set of decided positions; a long text is masked in several pieces."""
    rng = np.random.default_rng(length)
    for share in (0.1, 0.5, 0.95):
        tokens, masked = rng.integers(0, 60, length), rng.random(length) < share
        masked[rng.integers(length)] = True
        canvas = Canvas.for_infill(tokens, masked, 0, mask_id=MASK, pad_id=EOS)
        recipe = MaskedRecipe(compose("threshold"))
        row = Row(canvas, recipe, RowOptions.of(recipe, model), Slots.empty(length), canvas)
        job = Job(row, canvas, full_plan(canvas), np.flatnonzero(masked))
        logits = Forward(model, caches.compose("none")).logits([job])[0]
        expected = reordered_logits(reference, tokens, masked)[torch.from_numpy(masked)]
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("cache", "holes"), covering(["none", "wedlm"], [True, False]))
def test_every_step_is_the_reordered_forward(
    model: dllm.DiffusionModel, reference: Any, cache: str, holes: bool
) -> None:
    """Text behind the holes is seen, too."""
    if holes:
        text = [MASK if token < 0 else token for token in HOLES]
        out = dllm.infill(model, HOLES, sampler="wedlm", cache=cache, trace=True)
    else:
        text = PROMPTS[0] + [MASK] * 33
        out = run(model, PROMPTS[0], "wedlm(2.5)", cache)
    tokens = np.array(text)
    masked = tokens == MASK
    assert out.trace is not None and len(out.trace.steps) > 4
    for step in out.trace.steps:
        logits = reordered_logits(reference, tokens, masked)
        logits[:, [MASK, EOS] if holes else MASK] = -torch.inf  # nothing ends in a hole
        for position, token, logprob in step.commits:
            row = logits[position].log_softmax(-1)
            assert int(row.argmax()) == token
            assert float(row[token]) == pytest.approx(logprob, abs=1e-4)
        for position, token, _ in step.commits:
            tokens[position], masked[position] = token, False


@pytest.mark.parametrize("sampler", some(SAMPLERS, 1))
def test_the_cache_is_exact_and_rows_are_alone(model: dllm.DiffusionModel, sampler: str) -> None:
    exact, plain = (run(model, PROMPTS, sampler, cache) for cache in ("wedlm", "none"))
    for one, other in zip(exact, plain, strict=True):
        assert replayed(one) == replayed(other)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.computed < other.computed
    alone = [run(model, prompt, sampler, "wedlm") for prompt in PROMPTS]
    assert [(replayed(r), r.computed) for r in alone] == [(replayed(r), r.computed) for r in exact]


@pytest.mark.parametrize("seed", some(range(4), 1))
def test_the_cache_is_exact_for_any_order_of_decisions(
    model: dllm.DiffusionModel, seed: int
) -> None:
    """Random commits anywhere in a text with holes, some of them taken back: after every step the
    logits of all masks are those of no cache."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 60, 40)
    masked = rng.random(40) < 0.7
    masked[:4] = False
    parts = [WholeRegion() if seed % 2 else StaticBlocks(7), Random(), Some(seed), TakeBack(seed)]
    sampler = compose(parts, options={"eos_policy": "none"})
    cached, plain = (Decoding(model, sampler, caches.compose(c)) for c in ("wedlm", "none"))
    canvas = Canvas.for_infill(tokens, masked, 4, mask_id=MASK, pad_id=EOS, noise=noise)
    (row,) = cached.open([canvas])
    taken = computed = steps = 0
    for (step,) in cached.resume([row]):
        taken += len(step.decision.remasked)
        computed, steps = computed + step.positions, steps + 1
        if canvas.finished:
            break
        sampler.prepare(canvas)
        (other,) = plain.open([canvas.fork()])
        torch.testing.assert_close(
            cached.logits(row), plain.logits(other), rtol=1e-4, atol=1e-4
        )  # fmt: skip
    assert taken and computed < 40 * steps


def test_what_is_kept_is_what_a_causal_model_keeps(
    model: dllm.DiffusionModel, reference: Any
) -> None:
    """Keys and values of the decided beginning, one step after its decision."""
    recipe = MaskedRecipe(compose("wedlm(2.0)", options={"eos_policy": "none"}))
    canvas = Canvas.for_prompt(np.array(PROMPTS[2]), 40, mask_id=MASK, pad_id=EOS)
    engine = Engine(model, caches.compose("wedlm"))
    row = engine.admit(canvas, recipe, held=True)
    assert row is not None
    checked = 0
    while not canvas.finished:
        final = int(canvas.masked.argmax())  # before the step: what it is fed decided
        engine.step()
        with torch.inference_mode():
            ids = torch.from_numpy(canvas.tokens[:final])[None]
            kept = reference(ids, use_cache=True)[CACHE]
        buffer = engine.forward.buffer
        assert buffer is not None
        for layer, (keys, values) in enumerate(zip(buffer._keys, buffer._values, strict=True)):
            assert keys is not None and values is not None
            own = slice(row.base, (row.base or 0) + final)
            theirs = kept.layers[layer]
            for mine, other in ((keys, theirs.keys), (values, theirs.values)):
                torch.testing.assert_close(mine[:, :, own], other, rtol=1e-4, atol=1e-4)
        checked = max(checked, final)
    assert checked > 40


@pytest.mark.slow
def test_a_step_computes_the_window_and_what_was_just_decided(model: dllm.DiffusionModel) -> None:
    out, plain = (
        run(model, PROMPTS[2], "wedlm(2.5)", how, max_new_tokens=60) for how in ("wedlm", "none")
    )
    sizes = [step.computed for step in out.trace.steps]
    assert sizes[0] == 12 + 16
    assert max(sizes[1:]) <= 32
    assert out.computed < 0.4 * plain.computed


@pytest.mark.slow
def test_static_steps_change_nothing(model: dllm.DiffusionModel) -> None:
    plain = run(model, PROMPTS, "wedlm(2.0)", "wedlm")
    with graphs.uncaptured():
        padded = run(model, PROMPTS, "wedlm(2.0)", "wedlm", cuda_graphs=True)
    assert [replayed(a) for a in plain] == [replayed(b) for b in padded]


@pytest.mark.parametrize(("how", "sentence"), [
    ({"cache": "dual"}, r"needs keys and values that follow .* cache='dual' .*use cache='wedlm'"),
    ({"cache": "block"}, "block needs block-causal attention"),
    ({"cache": "elastic"}, r"needs keys and values .* cache='elastic' .*use cache='wedlm'"),
    ({"sampler": "prophet"}, "prophet needs decided tokens that predict themselves"),
    ({"cfg_scale": 0.5}, r"cfg_scale=0.5 needs masks .* leave it out"),
])  # fmt: skip
def test_what_cannot_be_had_is_refused(
    model: dllm.DiffusionModel, how: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(dllm.ConfigError, match=sentence):
        dllm.generate(model, PROMPTS[0], max_new_tokens=8, **how)


def test_other_models_refuse_the_cache(tiny: dllm.DiffusionModel) -> None:
    with pytest.raises(dllm.ConfigError, match="wedlm needs keys and values that follow the order"):
        dllm.generate(tiny, "x", cache="wedlm", max_new_tokens=4)


def test_flash_kernels_are_refused(folder: Path) -> None:
    with pytest.raises(dllm.ConfigError, match=r"attend under masks, .*load with attn"):
        dllm.load(folder, attn_implementation="flash_attention_2")


def test_likelihoods_follow_the_chain_rule(model: dllm.DiffusionModel, reference: Any) -> None:
    """Its own, as a causal model, in one forward; the diffusion model's where an estimator is
    named: from left to right, a mask for each position."""
    prompt, text = PROMPTS[0], PROMPTS[2][:7]
    with torch.inference_mode():
        laws = reference(torch.tensor([prompt + text])).logits[0].log_softmax(-1)
    expected = sum(float(laws[len(prompt) + i - 1, token]) for i, token in enumerate(text))
    result = dllm.score(model, prompt, text)
    assert result.logprob == pytest.approx(expected, abs=1e-3)
    assert (result.nfe, result.stderr) == (1, 0.0)
    tokens, total = np.array(prompt + text), 0.0
    for i, token in enumerate(text):
        masked = np.arange(len(tokens)) >= len(prompt) + i
        row = reordered_logits(reference, tokens, masked)[len(prompt) + i]
        total += float(row.log_softmax(-1)[token])
    named = dllm.score(model, prompt, text, estimator="left_to_right")
    assert named.logprob == pytest.approx(total, abs=1e-3)
    with pytest.raises(dllm.ConfigError, match=r"cfg_scale=0\.5 needs masks"):
        dllm.score(model, prompt, text, cfg_scale=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", some(["itself", "prompt_lookup"], 1))
def test_it_verifies_its_own_drafts(
    model: dllm.DiffusionModel, reference: Any, drafter: str
) -> None:
    """What it writes as a causal model is what transformers' generate writes with the network."""
    out = dllm.speculate(
        model, model if drafter == "itself" else drafter, PROMPTS, max_new_tokens=24
    )
    for prompt, result in zip(PROMPTS, out, strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
            eos_token_id=EOS, pad_token_id=EOS,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert result.tokens == expected


@pytest.mark.slow
def test_it_is_saved_and_loaded(model: dllm.DiffusionModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "saved")
    again = dllm.load(tmp_path / "saved")
    assert again.facts == model.facts and again.family is model.family
    assert replayed(run(again, PROMPTS[0], "wedlm", "wedlm")) == replayed(
        run(model, PROMPTS[0], "wedlm", "wedlm")
    )


def test_a_checkpoint_without_a_mask_token_says_so(tmp_path: Path) -> None:
    write(tmp_path / "w", "wedlm", mask_token_id=None)
    with pytest.raises(dllm.CheckpointError, match=r"no mask token: .* family 'wedlm' needs"):
        dllm.load(tmp_path / "w")
    assert dllm.load(tmp_path / "w", mask_token_id=MASK).facts.mask_token_id == MASK


def test_wrong_ways_to_load_it_say_the_right_one(tmp_path: Path) -> None:
    write(tmp_path / "w", "wedlm")
    for options, sentence in (
        ({"family": "autoregressive"}, "knows no model_type 'wedlm' .* 'wedlm' reads it"),
        ({"family": "wedlm_qwen2"}, "qk_norm=True; WeDLM on Qwen2.5 checkpoints are supported"),
        ({"block_length": 4}, "whose attention is causal, decided tokens first; leave it out"),
    ):
        with pytest.raises(dllm.CheckpointError, match=sentence):
            dllm.load(tmp_path / "w", **options)
    write(tmp_path / "x", "wedlm", qk_norm=None)
    with pytest.raises(dllm.CheckpointError, match="lacks qk_norm, which a WeDLM"):
        dllm.load(tmp_path / "x")
    plain = network("wedlm")
    with pytest.raises(
        dllm.ConfigError, match=r"family='wedlm' \(in place, decided tokens first\)"
    ):
        dllm.load(plain, mask_token_id=MASK)
    assert dllm.load(plain, family="wedlm", mask_token_id=MASK).facts.mask_kind == "decided_first"


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["wedlm", "none"])
@pytest.mark.parametrize("sampler", some(["wedlm", "threshold(0.05)+blocks(8)"], 1))
def test_append_is_the_largest_canvas_cut_at_the_stop(
    model: dllm.DiffusionModel, sampler: str, cache: str
) -> None:
    """Masks see nothing to their right but what is decided: what is appended later changes
    nothing, to the last bit where it is not computed (and masked) either."""
    free = run(model, PROMPTS[:2], sampler, cache, max_new_tokens=48)
    stop = free[0].tokens[20]
    ending = replace(model, facts=replace(model.facts, stop_token_ids=(stop,)))
    for one in (model, ending):
        more = {"max_new_tokens": 48, "eos_policy": "prefix_complete"}
        whole = run(one, PROMPTS[:2], sampler, cache, **more)
        found = run(one, PROMPTS[:2], sampler, cache, length="append(block=16)", **more)
        for a, b in zip(whole, found, strict=True):
            assert (a.tokens, a.order, a.finish_reason) == (b.tokens, b.order, b.finish_reason)
            assert a.nfe == b.nfe and np.allclose(a.logprobs, b.logprobs, rtol=1e-5)
            assert cache == "none" or np.array_equal(a.logprobs, b.logprobs)
            assert b.computed <= a.computed
    assert found[0].finish_reason == "stop" and found[0].canvas < 48
