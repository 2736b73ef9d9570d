"""Text fixed in the answer."""

import pytest

import dllm
from dllm.core.errors import ConfigError
from dllm.request.prompts import encode_continuation

from ..thin import some

PROMPT = "What is 4 + 5?"


def ids_of(text: str) -> list[int]:
    model = dllm.load("nano")
    assert model.tokenizer is not None
    return encode_continuation(model.tokenizer, text)


@pytest.mark.parametrize("sampler", some(["threshold", "llada", "dcd", "freedave", "remdm"], 2))
def test_a_constraint_stands_and_the_answer_does_not_end_before_it(sampler: str) -> None:
    free = dllm.generate("nano", PROMPT, sampler=sampler, max_new_tokens=32)
    offset = len(free.tokens) + 4  # behind where the answer would have ended
    out = dllm.generate(
        "nano", PROMPT, sampler=sampler, max_new_tokens=32, constraints={offset: " apples"}
    )
    ids = ids_of(" apples")
    answer = out.sequences[out.prompt_length :].tolist()
    assert answer[offset : offset + len(ids)] == ids
    assert len(out.tokens) >= offset + len(ids)
    assert "apples" in out.text


def test_constraints_as_ids_and_texts_agree() -> None:
    (token,) = ids_of("9")
    text, ids = (
        dllm.generate("nano", PROMPT, max_new_tokens=16, constraints={3: given})
        for given in ("9", token)
    )
    assert text.sequences.tolist() == ids.sequences.tolist()


@pytest.mark.parametrize(
    ("constraints", "match"),
    [
        ({15: "The answer is"}, "does not fit an answer of 16"),
        ({16: 5}, "does not fit"),
        ({-1: 5}, "offset"),
        ({2: 10**6}, "no id of the vocabulary"),
        ({2: 1}, "the constraint 1 is the mask token"),
        ({1: 5, 0: "The answer"}, "offset 1 stands in the tokens of the one before it"),
    ],
)
def test_constraints_that_cannot_hold(constraints: dict[int, int | str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        dllm.generate("nano", PROMPT, max_new_tokens=16, constraints=constraints)


@pytest.mark.parametrize("sampler", ["threshold+eotp", "threshold+eos(eos_policy=block_contains)"])
def test_holes_are_filled_whatever_ends_a_text(sampler: str) -> None:
    out = dllm.infill("nano", "4 + 5 = [[1]]. The answer is [[1]].", prompt=PROMPT, sampler=sampler)
    assert (
        out.text == dllm.infill("nano", "4 + 5 = [[1]]. The answer is [[1]].", prompt=PROMPT).text
    )


def test_options_reach_a_finished_sampler() -> None:
    how = {"steps": 4, "block_length": 8, "max_new_tokens": 32, "eos_policy": "none"}
    out = dllm.generate("nano", PROMPT, sampler=dllm.samplers.compose("llada"), **how)
    assert out.nfe == 4
