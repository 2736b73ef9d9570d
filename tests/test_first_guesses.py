"""What users of other libraries type first works, or is answered with the line to write."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dllm
from dllm.samplers.threshold import Threshold

PROMPT = "What is 4 + 5?"
GUESSES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda model: model.to("cuda"), "dllm.load(name, device='cuda'"),
    (lambda model: model.eval(), "is in eval mode"),
    (lambda model: model.config, "model.hf.config"),
    (lambda model: model([[1, 2]]), "model.generate(prompt)"),
    (lambda model: [*model], "its tokenizer is model.tokenizer"),
    (lambda model: model.generate(PROMPT).outputs[0].text, "result.text"),
    (lambda model: dllm.generate(model, PROMPT, generator=1), "here it is seed"),
    (lambda model: dllm.generate(model, PROMPT, observe=print), "dllm.Session"),
    (lambda model: dllm.generate(model, PROMPT, sampler="greedy"), "'llada'"),
    (lambda model: dllm.generate(model, PROMPT, sampler=Threshold), "an object of it, Threshold"),
    (lambda model: dllm.generate(model, PROMPT, sampler=lambda view: view), "a class with the"),
    (lambda model: dllm.infill(model, "Tom, [MASK], Ben"), "write [[1]]"),
    (lambda model: dllm.infill(model, "Tom, <|mdm_mask|>"), "<|mdm_mask|> marks no hole"),
    (lambda _: dllm.load("nano", load_in_8bit=True), "quantization='int8'"),
    (lambda model: dllm.load(torch.nn.DataParallel(model.hf)), "the transformers model in it"),
    (lambda _: dllm.load("nano", token="x"), "HF_TOKEN"),
    (lambda model: dllm.generate(PROMPT, model), "dllm.generate(model, prompt)"),
    (lambda model: dllm.generate(model, PROMPT, logprobs=5), "result.logprobs"),
    (lambda model: dllm.generate(model, PROMPT, assistant_model="nano"), "dllm.speculate(model"),
    (lambda model: dllm.generate(model, PROMPT, device="cuda"), "dllm.load"),
    (lambda model: dllm.generate(model, PROMPT, guided_json={}), "json_schema"),
    (lambda model: dllm.generate(model, PROMPT, sampler=["threshold"]), "join with '+'"),
    *((lambda _, name=name: getattr(dllm, name), ": ")  # type: ignore[misc]
      for name in ("LLM", "SamplingParams", "stream_generate", "chat", "pipeline")),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(GUESSES)))
def test_a_first_guess_is_answered(tiny: dllm.DiffusionModel, number: int) -> None:
    guess, words = GUESSES[number]
    with pytest.raises((dllm.DllmError, AttributeError), match=re.escape(words)) as told:
        guess(tiny)
    assert "\n" not in str(told.value) and len(str(told.value)) < 200


def test_a_model_generates_and_streams(tiny: dllm.DiffusionModel) -> None:
    result = dllm.generate(tiny, PROMPT, max_new_tokens=8)
    assert tiny.generate(PROMPT, max_new_tokens=8).tokens == result.tokens
    assert "".join(e.text for e in tiny.stream(PROMPT, max_new_tokens=8)) == result.text
    assert not hasattr(tiny, "to") and not hasattr(dllm, "LLM")
    assert copy.copy(tiny).name == tiny.name
    assert pickle.loads(pickle.dumps(result)).tokens == result.tokens


def test_errors_go_from_a_process_to_another() -> None:
    """One that cannot be made again there breaks a pool of processes."""
    for call in (lambda: dllm.load("nano", token="x"), lambda: dllm.GenerationConfig(stepz=3)):
        with pytest.raises(dllm.UnknownNameError) as told:
            call()
        again = pickle.loads(pickle.dumps(told.value))
        assert (str(again), vars(again)) == (str(told.value), vars(told.value))


def test_a_string_that_is_templated_already_is_warned_about() -> None:
    model: Any = dllm.load("nano")
    messages = [{"role": "user", "content": PROMPT}]
    templated = model.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    with pytest.warns(UserWarning, match="wrapped again: pass the messages"):
        dllm.generate(model, templated, max_new_tokens=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dllm.generate(model, templated, chat=False, max_new_tokens=1)
        dllm.generate(model, messages, max_new_tokens=1)
        dllm.generate(model, PROMPT, max_new_tokens=1)
