"""generate, stream and infill as a user calls them."""

import copy
import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TextDiffusionStreamer

import dllm
from dllm.core.errors import ConfigError, OutOfMemoryError, PromptError, UnknownNameError
from dllm.models import loader
from dllm.request.prompts import encode

PROMPT = "Reverse this list: Tom, Anna, Ben"


def test_every_form_of_a_prompt(tiny: dllm.DiffusionModel) -> None:
    message = {"role": "user", "content": PROMPT}
    ids = encode(tiny, PROMPT)
    forms: list[Any] = [PROMPT, message, [message], ids, ids.tolist(), torch.from_numpy(ids)]
    texts = {dllm.generate(tiny, form, max_new_tokens=8).text for form in forms}
    assert len(texts) == 1
    assert isinstance(dllm.generate(tiny, [PROMPT], max_new_tokens=8), list)
    assert len(dllm.generate(tiny, [[message], [message]], max_new_tokens=8)) == 2


def test_a_raw_prompt_skips_the_template(tiny: dllm.DiffusionModel) -> None:
    raw = encode(tiny, PROMPT, chat=False)
    assert len(encode(tiny, PROMPT)) == len(raw) + 2  # the template's two role tokens


def test_the_text_of_a_special_token_is_text(tiny: dllm.DiffusionModel) -> None:
    assert tiny.tokenizer is not None
    ids = encode(tiny, "What is <|mdm_mask|> worth?")
    assert tiny.facts.mask_token_id not in ids
    assert ids[0] == tiny.tokenizer.convert_tokens_to_ids("<|user|>")
    assert "<|mdm_mask|> worth" in tiny.tokenizer.decode(ids)
    plain = encode(tiny, "What is it worth?")
    assert plain[0] == ids[0] and plain[-1] == ids[-1]


def test_the_result_accounts_for_itself(tiny: dllm.DiffusionModel) -> None:
    out = dllm.generate(tiny, PROMPT, sampler="llada", max_new_tokens=12, steps=6, trace=True)
    assert out.trace is not None
    assert out.nfe == len(out.trace.steps) == 6
    assert out.computed == 6 * (out.prompt_length + 12)
    assert len(out.order) == len(out.tokens) == len(out.logprobs)
    assert out.sequences[out.prompt_length :][: len(out.tokens)].tolist() == out.tokens
    assert out.tokens_per_forward == len(out.tokens) / 6
    assert sorted(set(out.order)) == list(range(6))
    assert "6 forwards" in out.footer()
    assert str(out) == out.text and "<pre" in out._repr_html_()


def test_generation_ends_at_the_first_stop(tiny: dllm.DiffusionModel) -> None:
    """Decode everything, then cut, gives the text that stopping early gives."""
    for seed in range(2):
        arguments = {"temperature": 1.5, "seed": seed, "max_new_tokens": 40, "block_length": 8}
        early = dllm.generate(tiny, PROMPT, **arguments)
        late = dllm.generate(tiny, PROMPT, eos_policy="none", **arguments)
        assert early.tokens == late.tokens
        assert early.nfe <= late.nfe
        assert (early.finish_reason == "stop") == (early.tokens[-1] in tiny.facts.stop_token_ids)


def test_stop_strings_cut_the_text(tiny: dllm.DiffusionModel) -> None:
    full = dllm.generate(tiny, PROMPT, sampler="threshold(inf)", max_new_tokens=24)
    stop = full.text[len(full.text) // 2 :][:4]
    out = dllm.generate(
        tiny, PROMPT, sampler="threshold(inf)", max_new_tokens=24, stop_strings=stop
    )
    assert out.text == full.text[: full.text.index(stop)]
    assert out.finish_reason == "stop"
    assert out.nfe <= full.nfe


def test_stream_tells_everything_once(tiny: dllm.DiffusionModel) -> None:
    events = list(dllm.stream(tiny, [PROMPT, "Hello"], max_new_tokens=10))
    finals = {event.row: event.result for event in events if event.result is not None}
    whole = dllm.generate(tiny, [PROMPT, "Hello"], max_new_tokens=10)
    for row, expected in enumerate(whole):
        streamed: dict[int, int] = {}
        for event in events:
            if event.row == row:
                assert not streamed.keys() & event.committed.keys()
                streamed |= event.committed
        result = finals[row]
        assert result is not None and result.text == expected.text
        written = {p: int(t) for p, t in enumerate(expected.sequences) if p in streamed}
        assert {p: streamed[p] for p in written} == written


def test_a_transformers_streamer_prints_the_text(
    tiny: dllm.DiffusionModel, capsys: pytest.CaptureFixture[str]
) -> None:
    streamer = TextDiffusionStreamer(tiny.tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = dllm.generate(tiny, PROMPT, max_new_tokens=10, streamer=streamer)
    printed = capsys.readouterr().out
    assert printed.rsplit("\x1b[J", 1)[-1].strip() in out.text
    assert "\x1b[33m" in printed


def test_holes_are_filled_and_the_rest_is_kept(tiny: dllm.DiffusionModel) -> None:
    out = dllm.infill(tiny, "Tom has[[2]] apples. Anna buys[[3]] more.")
    assert out.text.startswith("Tom has") and out.text.endswith("more.")
    assert " apples. Anna buys" in out.text
    assert tiny.tokenizer is not None
    middle = tiny.tokenizer("apples. Anna buys", add_special_tokens=False)["input_ids"]
    assert out.tokens[4 : 4 + len(middle)] == middle  # no blank was added in front
    form = dllm.infill(tiny, "[[4]] The answer is [[2]].", prompt="What is 3 + 4?")
    assert " The answer is" in form.text and form.text.endswith(".")
    assert form.prompt_length == len(encode(tiny, "What is 3 + 4?"))
    ids = dllm.infill(tiny, [5, 6, -1, 7])
    assert [ids.tokens[i] for i in (0, 1, 3)] == [5, 6, 7]
    assert ids.tokens[2] not in tiny.facts.stop_token_ids


def test_an_answer_of_calls_alone_has_no_content(tiny: dllm.DiffusionModel) -> None:
    said: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ]
    texts = [encode(tiny, [*said[:1], {**said[1], "content": c}]).tolist() for c in (None, "")]
    assert texts[0] == texts[1]
    with pytest.raises(PromptError, match="is a text, not None"):
        encode(tiny, [{"role": "user", "content": None}])


def test_a_trace_is_plain_json(tiny: dllm.DiffusionModel, tmp_path: Path) -> None:
    out = dllm.generate(
        tiny, PROMPT, cache="dual", sampler="llada", max_new_tokens=8, trace=True, top_candidates=3
    )
    assert out.trace is not None
    out.trace.save(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    steps = data["steps"]
    replayed = [*data["prompt"], *[-1] * 8]
    for step in steps:
        for position, token, _ in step["commits"]:
            replayed[position] = token
        assert len(step["candidates"][0][1]) == 3
        assert step["computed"] == sum(high - low for low, high in step["compute"])
    assert replayed == data["final"] == out.sequences.tolist()
    assert [step["refresh"] for step in steps] == [True, *[False] * 7]


@pytest.mark.parametrize("sampler", ["dmax", "dmax(top_k=2)", "r2", "credit+adablock"])
def test_recorded_candidates_change_no_text(tiny: dllm.DiffusionModel, sampler: str) -> None:
    """Some samplers read the likeliest tokens themselves: not those for the trace alone."""
    how: dict[str, Any] = {"sampler": sampler, "max_new_tokens": 16}
    plain = dllm.generate(tiny, PROMPT, **how)
    told = dllm.generate(tiny, PROMPT, trace=True, top_candidates=5, **how)
    assert (told.tokens, told.order) == (plain.tokens, plain.order)


@pytest.mark.parametrize(
    "how", [{"cfg_scale": 1.0}, {"cache": "elastic"}, {"sampler": "lopa(k=3)"}, {}]
)
def test_a_trace_tells_what_was_computed(tiny: dllm.DiffusionModel, how: dict[str, Any]) -> None:
    """For guidance rows are fed twice, and some caches feed other positions to each layer."""
    out = dllm.generate(tiny, PROMPT, max_new_tokens=16, trace=True, **how)
    assert out.trace is not None and out.trace.computed == out.computed
    assert f"positions computed {out.computed} " in out.trace._repr_html_()


@pytest.mark.parametrize("prompts", [None, 5, "one prompt", {"role": "user", "content": "x"}])
def test_what_is_no_list_of_prompts(tiny: dllm.DiffusionModel, prompts: Any) -> None:
    with pytest.raises(PromptError, match="a list or an iterator of prompts, not "):
        dllm.as_completed(tiny, prompts)


def test_a_tokenizer_of_another_model(tiny: dllm.DiffusionModel) -> None:
    """Where it goes on behind the vocabulary, only texts with those tokens are refused."""
    tokenizer = copy.deepcopy(tiny.tokenizer)
    assert tokenizer is not None
    tokenizer.add_tokens(["foreign"])
    model = replace(tiny, tokenizer=tokenizer)
    messages = [{"role": "user", "content": "foreign"}]
    for ask in (
        lambda: dllm.generate(model, "foreign", chat=False, max_new_tokens=4),
        lambda: dllm.generate(model, messages, max_new_tokens=4),
        lambda: dllm.infill(model, "foreign [[2]]"),
        lambda: dllm.infill(model, "foreign [[*]]"),
        lambda: dllm.score(model, "a", " foreign", samples=1),
    ):
        with pytest.raises(dllm.DllmError, match="vocabulary"):
            ask()
    assert dllm.generate(model, "plain", chat=False, max_new_tokens=4).tokens


@pytest.mark.parametrize(
    ("prompt", "arguments", "error", "words"),
    [
        ("", {}, PromptError, "empty"),
        ("  \n", {}, PromptError, "empty"),
        ([], {}, PromptError, "empty"),
        ([[1, 2], []], {}, PromptError, "empty"),
        ("word " * 300, {}, PromptError, "shorten it by at least"),
        (PROMPT, {"max_new_tokens": 4000}, PromptError, "max_new_tokens="),
        ([1, 10**6], {}, PromptError, "outside the vocabulary"),
        ([1, -5], {}, PromptError, "outside the vocabulary"),
        ([1, 2.5], {}, PromptError, "token ids"),
        ([1.5], {}, PromptError, "token ids, not 1.5"),
        (["a", 5], {}, PromptError, "token ids, not 5"),
        (5, {}, PromptError, "token ids, not 5"),
        (b"ab", {}, PromptError, "token ids, not b'ab'"),
        ({"role": "user"}, {}, PromptError, "chat messages look like"),
        ("\ud800", {}, PromptError, "not valid Unicode"),
        (PROMPT, {"repetitions": [0, 1]}, ConfigError, "1 prompts have as many repetitions"),
        (PROMPT, {"repetitions": 5}, ConfigError, "repetitions are whole numbers from 0, not 5"),
        (PROMPT, {"repetitions": ["a"]}, ConfigError, "repetitions are whole numbers from 0"),
        (PROMPT, {"n": 0}, ConfigError, "n is a whole number from 1, not 0"),
        (PROMPT, {"repetitions": [-1]}, ConfigError, "repetitions are whole numbers from 0"),
        ([{"text": "hi"}], {}, PromptError, "'role'"),
        (PROMPT, {"sampler": "trheshold"}, UnknownNameError, "did you mean 'threshold'"),
        (PROMPT, {"cache": "daul"}, UnknownNameError, "did you mean 'dual'"),
        (PROMPT, {"cache": "dual+prefix"}, ConfigError, "choose one"),
        (PROMPT, {"temprature": 1}, UnknownNameError, "did you mean 'temperature'"),
        (PROMPT, {"min_new_tokens": 9, "max_new_tokens": 8}, ConfigError, "exceeds"),
        (PROMPT, {"eos_policy": "never"}, UnknownNameError, "eos_policy"),
        (PROMPT, {"sampler": "threshold(3)"}, ConfigError, "outside [0, 1]"),
        (PROMPT, {"sampler": "llada", "steps": 2, "block_length": 4, "max_new_tokens": 32},
         ConfigError, "no step"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(
    tiny: dllm.DiffusionModel, prompt: Any, arguments: dict[str, Any], error: type[Exception],
    words: str,
) -> None:  # fmt: skip
    with pytest.raises(error) as result:
        dllm.generate(tiny, prompt, **arguments)
    assert words in str(result.value) and "\n" not in str(result.value)
    assert dllm.generate(tiny, PROMPT, max_new_tokens=4).tokens  # everything stays usable


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [("no hole", {}, "no hole"), ("[[3]]", {"max_new_tokens": 4}, "drop max_new_tokens"),
     ("[[2]]", {"constraints": {0: 5}}, "drop constraints"),
     ("[[2]]", {"top_k": 3}, "no effect at temperature 0")],
)  # fmt: skip
def test_bad_holes(
    tiny: dllm.DiffusionModel, text: Any, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(dllm.DllmError, match=words):
        dllm.infill(tiny, text, **arguments)


def test_a_block_length_that_does_not_divide_works(tiny: dllm.DiffusionModel) -> None:
    out = dllm.generate(
        tiny, PROMPT, block_length=5, max_new_tokens=12, eos_policy="none", trace=True
    )
    assert out.trace is not None
    windows, start = {step.window for step in out.trace.steps}, out.prompt_length
    assert windows == {(start, start + 5), (start + 5, start + 10), (start + 10, start + 12)}


def test_an_autoregressive_model_is_refused() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2)  # fmt: skip
    verifier = dllm.load(LlamaForCausalLM(config), family="autoregressive")
    with pytest.raises(ConfigError, match="autoregressive"):
        dllm.generate(verifier, [1, 2, 3])


def test_out_of_memory_says_what_to_do(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setitem(tiny.backbone.__dict__, "forward", fail)
        with pytest.raises(OutOfMemoryError, match="max_batch_tokens="):
            dllm.generate(tiny, PROMPT, max_new_tokens=8)
    assert dllm.generate(tiny, PROMPT, max_new_tokens=8).tokens


def test_bfloat16_decodes(tiny_folder: Path) -> None:
    model = dllm.load(tiny_folder, dtype="bfloat16")
    for cache in ("none", "dual"):
        out = dllm.generate(model, PROMPT, cache=cache, max_new_tokens=12, block_length=4)
        assert np.isfinite(out.logprobs).all()


def test_only_decided_tokens_are_counted() -> None:
    out = dllm.infill("nano", "23 + 12: 3 + 2 =[[1]], 2 + 1 = 3: 35. The answer is 35.")
    assert len(out.tokens) > 20 and out.decided == 1
    assert out.tokens_per_forward == 1 / out.nfe
    assert out.footer().startswith("1 token · 1 forward · 1.00 tokens per forward")


@pytest.mark.parametrize("how", [{}, {"max_new_tokens": 1, "constraints": {0: 5}}])
def test_every_row_ends_with_its_result(tiny: dllm.DiffusionModel, how: dict[str, Any]) -> None:
    """Also one that has nothing left to decide."""
    events = list(dllm.stream(tiny, [PROMPT, "Tom"], **{"max_new_tokens": 6, **how}))
    for row in (0, 1):
        mine = [event for event in events if event.row == row]
        assert [event.result is not None for event in mine] == [False] * (len(mine) - 1) + [True]
        assert "".join(event.text for event in mine) == mine[-1].result.text  # type: ignore[union-attr]


def test_a_stop_string_before_a_stop_id_ends_the_tokens_too() -> None:
    """nano decides the whole answer, its end among it, in one step."""
    whole = dllm.generate("nano", "What is 4 + 5?")
    assert whole.nfe == 1 and whole.text == "4 + 5 = 9."
    out = dllm.generate("nano", "What is 4 + 5?", stop_strings="=", trace=True)
    (step,) = out.trace.steps  # type: ignore[union-attr]
    assert all(step.window[0] <= at < step.window[1] for at, *_ in step.commits)
    assert out.text == "4 + 5 " and out.nfe == 1 and out.finish_reason == "stop"
    assert dllm.load("nano").tokenizer.decode(out.tokens).strip() == "4 + 5 ="  # type: ignore[union-attr]


def test_a_stop_string_does_not_end_before_what_is_given() -> None:
    how: dict[str, Any] = {"constraints": {6: " Tom"}, "max_new_tokens": 16, "eos_policy": "none"}
    whole = dllm.generate("nano", "What is 4 + 5?", **how)
    first = whole.text[:1]
    assert first in whole.text[: whole.text.index("Tom")]
    out = dllm.generate("nano", "What is 4 + 5?", stop_strings=first, **how)
    assert "Tom" in out.text and out.text.startswith(whole.text[: whole.text.index("Tom") + 3])
    assert first not in out.text[out.text.index("Tom") + 3 :]
    streamed = "".join(
        e.text for e in dllm.stream("nano", "What is 4 + 5?", stop_strings=first, **how)
    )
    assert streamed == out.text


@pytest.mark.parametrize(("least", "text"), [(2, "4 + "), (3, "4 + 5 "), (4, "4 + 5 = 9.")])
def test_a_stop_string_does_not_end_before_the_least_tokens(least: int, text: str) -> None:
    """The answer is "4 + 5 = 9.", a token for each character that is no blank."""
    how: dict[str, Any] = {"stop_strings": ["4", "5", "+", "="], "min_new_tokens": least}
    out = dllm.generate("nano", "What is 4 + 5?", **how)
    assert out.text == text
    assert "".join(e.text for e in dllm.stream("nano", "What is 4 + 5?", **how)) == out.text


def test_a_long_prompt_leaves_a_short_answer(nano: dllm.DiffusionModel) -> None:
    """The checkpoint recommends 64 new tokens; what is left of its context is taken instead."""
    context = nano.facts.context_length
    out = dllm.generate(nano, [5] * (context - 1))
    assert len(out.sequences) == context
    with pytest.raises(PromptError, match="pass max_new_tokens=1"):
        dllm.generate(nano, [5] * (context - 1), max_new_tokens=2)
    with pytest.raises(PromptError, match="shorten it by at least 1"):
        dllm.generate(nano, [5] * context)


def test_a_warm_call_costs_the_host_little() -> None:
    """Calls of the library's own functions before the first step and for the result, and no frame
    of what was not asked for."""
    how: Any = {"sampler": "localleap", "cache": "dual"}
    rooms = (dllm, dllm.samplers, dllm.cache, dllm.kernels)
    own = tuple(f"{Path(str(room.__file__)).parent}{os.sep}" for room in rooms)
    phase, calls = "preparation", list[tuple[str, str]]()

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal phase
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(own):
            return
        if file.endswith("scheduler.py"):
            phase = {"advance": "steps", "_finish": "result"}.get(frame.f_code.co_name, phase)
        calls.append((phase, file))

    for _ in range(2):
        dllm.generate("nano", PROMPT, **how)
    sys.setprofile(profile)
    dllm.generate("nano", PROMPT, **how)
    sys.setprofile(None)
    count = Counter(phase for phase, _ in calls)
    assert count["preparation"] <= 160 and count["result"] <= 30, count
    assert len({file for phase, file in calls if phase == "preparation"}) <= 27
    unasked = "/structured/", "streamers.py", "stopping.py", "holes.py", "trace.py"
    assert not {file for _, file in calls if any(name in file for name in unasked)}


def test_a_name_is_loaded_once(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], loader.load
    monkeypatch.setattr(loader, "load", lambda model: made.append(model) or real(model))
    for _ in range(2):
        dllm.generate(tiny_folder, PROMPT, max_new_tokens=4)
    assert made == [tiny_folder]
    os.utime(tiny_folder / "config.json", (1, 1))
    dllm.generate(tiny_folder, PROMPT, max_new_tokens=4)
    assert len(made) == 2
    assert real("nano") is not real("nano")
