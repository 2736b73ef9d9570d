"""Bad values: one sentence each, before anything is decoded."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dllm
from dllm.core.canvas import Canvas
from dllm.core.config import ELSEWHERE, GenerationArguments, GenerationConfig
from dllm.core.errors import ConfigError, DllmError, PromptError, UnknownNameError
from dllm.request.prompts import encode, encode_holes, is_batch
from dllm.samplers.windows import StaticBlocks

HUGE = 10**5000  # Python refuses to print it


class Shown:
    """An object of another library, with a text of several lines or with none."""

    def __init__(self, text: Any) -> None:
        self.text = text

    def __repr__(self) -> str:
        return str.strip(self.text)


WRONG: list[tuple[str, Any, str]] = [
    ("temperature", 1e39, "at most 1e+06"),
    ("seed", 2**63, f"at most {2**63 - 1}, not"),
    ("temperature", float("nan"), "finite"),
    ("temperature", float("inf"), "finite"),
    ("temperature", "x", "must be a number, not 'x'"),
    ("temperature", True, "must be a number, not True"),
    ("temperature", np.True_, "must be a number, not np.True_"),
    ("temperature", -1, "at least 0"),
    ("temperature", None, "must be a number"),
    ("cfg_scale", 1e39, "at most"),
    ("top_p", "x", "must be a number"),
    ("top_p", None, "must be a number"),
    ("top_p", True, "must be a number"),
    ("top_p", 0, "above 0"),
    ("top_p", 1.5, "at most 1"),
    ("top_k", 2.0, "a whole number"),
    ("top_k", 10**30, "at most"),
    ("seed", None, "a whole number"),
    ("seed", "a", "a whole number"),
    ("seed", 1.5, "a whole number"),
    ("seed", True, "a whole number"),
    ("seed", -1, "at least 0"),
    ("seed", 2**63, "at most"),
    ("min_new_tokens", None, "a whole number"),
    ("max_new_tokens", 0, "at least 1"),
    ("max_new_tokens", 10**30, "at most"),
    ("cuda_graphs", "yes", "True or False"),
    ("suppress_mask", "no", "True or False"),
    ("eos_policy", 5, "a name"),
    ("length", 64, "a rule such as 'append'"),
    ("stop_strings", None, "a text or a list of texts"),
    ("stop_strings", 5, "a text or a list of texts"),
    ("stop_strings", b"x", "a text or a list of texts"),
    ("stop_strings", {"a": 1}, "a text or a list of texts"),
    ("stop_strings", (5,), "not one with 5"),
    ("stop_strings", ["a", ""], "empty"),
    ("stop_strings", "", "empty"),
    ("stop_strings", "\ud800", "not valid Unicode"),
    ("constraints", None, "constraints map offsets"),
    ("constraints", [1], "constraints map offsets"),
    ("constraints", {"0": 1}, "not '0' to 1"),
    ("constraints", {True: 5}, "not True to 5"),
    ("constraints", {0: True}, "not 0 to True"),
    ("constraints", {0: ""}, "not 0 to ''"),
    ("constraints", {0: -1}, "not 0 to -1"),
    ("constraints", {-1: 5}, "not -1 to 5"),
    ("regex", 5, "an expression as a text"),
    ("regex", "\ud800", "not valid Unicode"),
    ("choice", "yes", "a list of texts"),
    ("choice", np.array(5), "a list of texts, not"),
    ("stop_strings", np.array(5), "a list of texts, not"),
    ("remask", np.array(5), "a list of positions"),
    ("choice", [], "a list of texts"),
    ("choice", ["a", 5], "not one with 5"),
    ("json_schema", [1], "a pydantic class, a dictionary, or a file"),
    ("json_schema", {1: 2}, "a pydantic class, a dictionary, or a file"),
    ("json_schema", int, "a pydantic class, a dictionary, or a file"),
    ("json_schema", "\ud800", "not valid Unicode"),
    ("confidence", "mar", "'model' or left out"),
    ("regex", Shown("two\nlines"), "not two lines"),
    ("regex", Shown(None), "not such a Shown"),
    ("constraints", {0: "a", 7: "\ud800"}, "constraints[7] is not valid Unicode"),
]


@pytest.mark.parametrize("name", ["exact", "trace"])
def test_a_word_is_no_switch(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is True or False, not 'no'$"):
        how: Any = {name: "no"}
        if name == "exact":
            dllm.speculate("nano-ar", None, "hi", **how)
        else:
            dllm.generate("nano", "hi", **how)


@pytest.mark.parametrize(("name", "value", "words"), WRONG)
def test_a_wrong_value_gets_one_sentence(name: str, value: Any, words: str) -> None:
    with pytest.raises(DllmError) as result:
        GenerationConfig(**{name: value})
    assert words in str(result.value) and name in str(result.value)
    assert "\n" not in str(result.value) and len(str(result.value)) < 200


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(10**40), 10**40), st.floats(),
    st.text(max_size=3), st.binary(max_size=2), st.lists(st.integers(-2, 2), max_size=2),
    st.dictionaries(st.integers(-1, 3), st.one_of(st.integers(), st.text(max_size=2)), max_size=2),
    st.just(HUGE), st.just(float("nan")), st.just("\ud800"),
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([*GenerationConfig.fields()]), ANYTHING)
def test_any_value_is_taken_or_refused_in_one_sentence(name: str, value: Any) -> None:
    try:
        config = GenerationConfig(**{name: value})
    except DllmError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
    else:
        kept = getattr(config, name)
        assert kept is None or kept == value or kept == (value,) or kept == tuple(value)


def test_numbers_of_numpy_are_numbers() -> None:
    config = GenerationConfig(
        max_new_tokens=np.int64(5), temperature=np.float32(0.5), seed=torch.tensor(3),
        stop_strings=["a", "b"], constraints={np.int64(2): np.int64(7)},
    )  # fmt: skip
    assert (config.max_new_tokens, config.temperature, config.seed) == (5, 0.5, 3)
    assert type(config.max_new_tokens) is int and type(config.temperature) is float
    assert (config.stop_strings, config.constraints) == (("a", "b"), {2: 7})
    assert all(type(key) is int for key in config.constraints)
    assert len(dllm.generate("nano", PROMPT, n=np.int64(2))) == 2  # type: ignore[call-overload]


def test_parts_hold_plain_numbers() -> None:
    """Small types of numpy wrap around: blocks had other lengths."""
    part = StaticBlocks(np.uint8(4))  # type: ignore[arg-type]
    canvas = Canvas.for_prompt(np.arange(2), 9, mask_id=1, pad_id=0)
    part.advance(canvas)
    assert (type(part.block_length), canvas.window) == (int, (2, 6))


def flat(field: Any) -> list[Any]:
    """All metadata of a field, also inside of ``| None``."""
    inner = [
        m
        for part in getattr(field.annotation, "__args__", ())
        for m in getattr(part, "__metadata__", ())
    ]
    return [*field.metadata, *inner, *(n for m in inner for n in getattr(m, "metadata", ()))]


def test_every_number_of_a_config_has_its_range() -> None:
    numbers = {
        name
        for name, field in GenerationConfig.fields().items()
        if {"g", "l"} == {n[0] for m in flat(field) for n in ("ge", "gt", "le") if hasattr(m, n)}
    }
    assert {*GenerationConfig.fields()} - numbers == {
        "eos_policy", "stop_strings", "cuda_graphs", "suppress_mask", "constraints",
        "initial_text", "remask", "length", "cache_salt", "extra_keys",
        "regex", "choice", "json_schema", "grammar", "structural_tag", "confidence", "literals",
    }  # fmt: skip


def test_editors_know_the_arguments() -> None:
    """`GenerationArguments` has the fields of a config; types may be wider, for what is joined."""
    every, arguments = get_type_hints(GenerationConfig), get_type_hints(GenerationArguments)
    config = {name: every[name] for name in GenerationConfig.fields()}
    assert list(arguments) == list(config)
    assert GenerationArguments.__total__ is False
    wider = {"stop_strings", "choice", "remask"}
    assert {n for n in config if config[n] != arguments[n]} == wider


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("stop", "stop_strings"),
        ("do_sample", "temperature"),
        ("stop_token_ids", "dllm.load"),
        ("max_length", "max_new_tokens"),
        ("guidance_scale", "cfg_scale"),
        ("remasking", "sampler='llada(remasking=random)'"),
    ],
)
def test_names_of_other_libraries_point_to_ours(name: str, here: str) -> None:
    with pytest.raises(UnknownNameError) as result:
        GenerationConfig.build({}, {name: 1})
    assert f"unknown generation argument '{name}'; here it is" in str(result.value)
    assert here in str(result.value)


def test_no_name_of_ours_is_said_to_be_foreign() -> None:
    assert not {*GenerationConfig.fields()} & set(ELSEWHERE)


@pytest.mark.parametrize(
    ("given", "facts", "words"),
    [
        ({"top_p": 0.5}, {}, "top_p has no effect at temperature 0"),
        ({"top_k": 5}, {}, "top_k has no effect at temperature 0"),
        ({"block_length": 100}, {}, "exceeds the canvas of 64"),
        ({"top_candidates": 3}, {"traced": False}, "written to the trace"),
        ({"top_p": 0.5, "temperature": 1.0}, {}, None),
        ({"top_p": 0.5}, {"tempered": True}, None),
        ({"top_p": 1.0, "top_k": 0}, {}, None),
        ({"block_length": 64}, {}, None),
        ({"top_candidates": 3}, {}, None),
        ({"top_candidates": 0, "cuda_graphs": False}, {"traced": False}, None),
    ],
)
def test_an_option_without_effect_is_refused(
    given: dict[str, Any], facts: dict[str, Any], words: str | None
) -> None:
    usual = {"canvas": 64, "tempered": False, "traced": True} | facts
    if words:
        with pytest.raises(ConfigError, match=words):
            GenerationConfig(**given).check_used(**usual)
    else:
        GenerationConfig(**given).check_used(**usual)
    GenerationConfig.build(given, {}).check_used(**usual)  # a checkpoint may recommend it


PROMPT = "What is 4 + 5?"
CALLS: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (dllm.generate, {"cuda_graphs": True, "cache": "dual"}, "needs a CUDA GPU, not cpu"),
    (dllm.generate, {"config": 5}, "dllm.GenerationConfig, not 5"),
    (dllm.generate, {"config": {"seed": 1}}, "dllm.GenerationConfig"),
    (dllm.generate, {"chat": "no"}, "True, False or None"),
    (dllm.generate, {"top_k": 3}, "no effect at temperature 0"),
    (dllm.stream, {"cuda_graphs": True, "cache": "dual"}, "needs a CUDA GPU, not cpu"),
    (partial(dllm.speculate, "nano-ar", "prompt_lookup"), {"top_p": 0.5}, "no effect at"),
    (partial(dllm.speculate, "nano-ar", None), {"top_k": 5}, "no effect at temperature 0"),
    (partial(dllm.speculate, "nano-ar", None), {"repetition_penalty": "x"}, "a number above 0"),
    (partial(dllm.speculate, "nano-ar", None), {"logits_processor": 5}, "a list of callables"),
    (partial(dllm.speculate, "nano-ar", None), {"vocabulary": "x"}, "vocabulary is 'auto'"),
    (partial(dllm.speculate, "nano-ar", None), {"tokenizer": 5}, "a hub id, a folder or"),
    (partial(dllm.speculate, "nano-ar", None), {"stop": "a"}, "here it is stop_strings"),
    (partial(dllm.speculate, "nano-ar", None), {"do_sample": True}, "here it is temperature"),
    (partial(dllm.speculate, "nano-ar", 5), {}, "a hub id, a folder or a bundled name, not 5"),
]


@pytest.mark.parametrize(("call", "how", "words"), CALLS)
def test_a_call_that_cannot_mean_what_it_says(
    call: Callable[..., Any], how: dict[str, Any], words: str
) -> None:
    model = [] if isinstance(call, partial) else ["nano"]
    with pytest.raises(DllmError) as result:
        call(*model, PROMPT, **how)
    assert words in str(result.value) and "\n" not in str(result.value)


@pytest.mark.parametrize("how", [{"dtype": "float32"}, {"tokenizer": "nano"}, {"device": "cpu"}])
def test_a_loaded_model_is_as_it_is(how: dict[str, str]) -> None:
    model = dllm.load("nano")
    assert dllm.load(model) is model
    with pytest.raises(ConfigError, match=f"loaded already, {next(iter(how))} has no effect"):
        dllm.load(model, **how)


def test_static_steps_of_a_session_and_without_a_gpu() -> None:
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        dllm.Session("nano", cuda_graphs=True, cache="dual")


def test_a_cache_and_a_sampler_are_names_or_objects() -> None:
    for cache in (None, 5, [], ["dual"], b"dual"):
        with pytest.raises(ConfigError, match="a cache is a name or an object"):
            dllm.cache.compose(cache)  # type: ignore[arg-type]
    for sampler in (None, 5, [], (), [None]):
        with pytest.raises(ConfigError, match="name"):
            dllm.samplers.compose(sampler)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec",
    ["threshold" + "+threshold" * 3000, "a" + "+a" * 2000, "(" * 3000, "lopa(" * 190 + "a",
     "a" + ".b" * 2000, "-" * 4000 + "a", "threshold\0", "threshold(" + "9" * 5000 + ")", ""],
)  # fmt: skip
def test_a_spec_that_is_no_spec(spec: str) -> None:
    with pytest.raises(DllmError) as result:
        dllm.samplers.compose(spec)
    assert len(str(result.value)) < 300


HOLES: list[tuple[Any, str]] = [
    ([10**9, -1], "token id 1000000000 is outside the vocabulary"),
    ([10**30, -1], "is outside the vocabulary"),
    ([-2, -1], "token id -2"),
    ("[[99999999999999999999]]", "exceeds the context"),
    ("[[4000]]", "a hole of 4000 tokens exceeds the context"),
    ("[[1]]\ud800", "not valid Unicode"),
    (["a [[1]]"], "not a list with 'a [[1]]'"),
    ([{"role": "user", "content": "x [[1]]"}], "token ids with -1"),
    (None, "token ids with -1, not None"),
    (b"[[1]]", "token ids with -1"),
    ([1.5, -1], "not a list with 1.5"),
    ([True, -1], "not a list with True"),
    (torch.tensor([1.0, -1.0]), "not a list with 1.0"),
    ("a [[0]]", "a hole of no tokens"),
    ([5, 6], "no hole"),
    ([], "no hole"),
]


@pytest.mark.parametrize(("text", "words"), HOLES)
def test_holes_that_cannot_be_filled(tiny: dllm.DiffusionModel, text: Any, words: str) -> None:
    with pytest.raises(PromptError) as result:
        encode_holes(tiny, text)
    assert words in str(result.value)


def test_holes_of_text_and_ids(tiny: dllm.DiffusionModel) -> None:
    ids, holes, sizes = encode_holes(tiny, "Tom[[2]] has[[1]]")
    assert sizes == (2, 1) and holes.tolist()[1:] == [True, True, False, True] and not holes[0]
    again, same, also = encode_holes(tiny, np.where(holes, -1, ids))
    assert np.array_equal(again, ids) and np.array_equal(same, holes) and also == sizes


def test_what_a_tokenizer_returns_is_no_prompt(tiny: dllm.DiffusionModel) -> None:
    assert tiny.tokenizer is not None
    for encoded in (tiny.tokenizer("Tom"), tiny.tokenizer("Tom", return_tensors="pt")):
        with pytest.raises(PromptError, match="input_ids"):
            encode(tiny, encoded)
        assert is_batch([encoded, encoded])


def test_a_role_is_one_that_templates_know(tiny: dllm.DiffusionModel) -> None:
    with pytest.raises(UnknownNameError, match="role of a message 'usr'; did you mean 'user'"):
        encode(tiny, [{"role": "usr", "content": "Tom"}])


def test_contents_are_texts(tiny: dllm.DiffusionModel) -> None:
    parts = [{"type": "text", "text": "Tom "}, {"type": "text", "text": "has"}]
    joined = encode(tiny, [{"role": "user", "content": parts}])
    assert joined.tolist() == encode(tiny, [{"role": "user", "content": "Tom has"}]).tolist()
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    for content in (None, 5, image, [{"text": 5}], ["Tom"]):
        with pytest.raises(PromptError, match="text"):
            encode(tiny, [{"role": "user", "content": content}])


def test_ids_of_any_size(tiny: dllm.DiffusionModel) -> None:
    for prompt in (10**30, [10**30], [HUGE], HUGE):
        with pytest.raises(PromptError):
            encode(tiny, prompt)


@pytest.mark.parametrize("prompts", [iter(["a", "b"]), {"a", "b"}, (x for x in "ab")])
def test_several_prompts_are_a_list(prompts: Any) -> None:
    with pytest.raises(PromptError, match="several prompts are a list"):
        is_batch(prompts)


def test_a_drafter_that_is_nearly_one_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    from dllm.drafting.naming import is_drafter_spec

    for name in ("promptlookup", "prompt_lokup(k=3)", "sufix"):
        with pytest.raises(UnknownNameError, match=r"unknown drafter .* did you mean"):
            is_drafter_spec(name)
    assert is_drafter_spec("prompt_lookup(k=3)")
    (tmp_path / "suffix2").mkdir()
    for model in ("nano", "nano-ar", "somebody/sufix", str(tmp_path / "suffix2")):
        assert not is_drafter_spec(model)
