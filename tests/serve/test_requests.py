"""Bodies of requests: what is honoured, what changes nothing, what is refused and how."""

from typing import Any

import pytest

from dllm.serve.bodies import REFUSED, ScoreBody
from dllm.serve.problems import Problem
from dllm.serve.requests import GenerateRequest, read_chat, read_infill, read_text
from dllm.serve.words import in_http

HELLO = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> GenerateRequest:
    return read_chat({"messages": HELLO, **fields})


def text(**fields: Any) -> GenerateRequest:
    return read_text({"prompt": "Hello", **fields})


def refused(read: Any, body: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        read(body)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_new_tokens": 5}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 0.5, "seed": 7}, {"temperature": 0.5, "seed": 7}),
        ({"temperature": 1, "seed": 7, "top_p": 0.9, "top_k": 4},
         {"temperature": 1, "seed": 7, "top_p": 0.9, "top_k": 4}),
        ({"temperature": 0, "top_p": 0.9, "top_k": 4}, {"temperature": 0}),
        ({"top_p": 0.9}, {}),
        ({"top_k": -1}, {}),
        ({"top_k": 0}, {}),
        ({"stop": "x"}, {"stop_strings": ("x",)}),
        ({"stop": ["x", "yz"]}, {"stop_strings": ("x", "yz")}),
        ({"stop": []}, {}),
        ({"min_tokens": 3}, {"min_new_tokens": 3}),
        ({"min_tokens": 0}, {}),
        ({"ignore_eos": True, "max_tokens": 9}, {"max_new_tokens": 9, "min_new_tokens": 9}),
        ({"ignore_eos": True, "max_tokens": 9, "min_tokens": 2, "stop": "x"},
         {"max_new_tokens": 9, "min_new_tokens": 2, "stop_strings": ("x",)}),
        ({"steps": 4, "block_length": 8}, {"steps": 4, "block_length": 8}),
        ({"cfg_scale": 1.5, "eos_policy": "none"}, {"cfg_scale": 1.5, "eos_policy": "none"}),
        ({"constraints": {"4": "is"}}, {"constraints": {4: "is"}}),
    ],
)  # fmt: skip
def test_what_becomes_of_honoured_fields(given: Any, expected: Any) -> None:
    assert chat(**given).arguments == expected


def test_an_answer_that_is_sampled_without_a_seed_draws_one() -> None:
    seeds = {chat(temperature=1).arguments["seed"] for _ in range(8)}
    assert len(seeds) > 1
    assert "seed" not in chat(temperature=0).arguments


@pytest.mark.parametrize(
    "given",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0},
        {"logit_bias": {}, "logprobs": None, "stop": None, "seed": None, "tools": None},
        {"tools": [], "tool_choice": "none", "functions": [], "parallel_tool_calls": True},
        {"response_format": {"type": "text", "json_schema": None}, "modalities": ["text"]},
        {"response_format": {"type": "text"}, "store": False},
        {"metadata": {"a": "b"}, "service_tier": "auto", "verbosity": "low", "store": True},
        {"plugins": None, "temprature": None, "seed": -1, "echo": False, "best_of": 1.0},
        {"reasoning_effort": "high", "prompt_cache_key": "k", "safety_identifier": "s"},
    ],
)
def test_neutral_values_change_nothing(given: Any) -> None:
    assert chat(**given) == chat()
    assert chat(n=2, best_of=2) == chat(n=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length_penalty", 0.5), ("functions", [{"name": "f"}]),
        ("guided_regex", "a"),
        ("guided_json", {"type": "object"}), ("best_of", 2), ("echo", True),
        ("audio", {"voice": "x"}), ("prediction", {"content": "x"}),
        ("stop_token_ids", [3]), ("modalities", ["audio"]),
    ],
)  # fmt: skip
def test_other_values_are_refused_with_a_reason(name: str, value: Any) -> None:
    problem = refused(read_chat, {"messages": HELLO, name: value})
    assert problem.param == name and name in problem.message
    assert problem.code == "unsupported_value"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", True), ("max_tokens", "5"),
        ("temperature", -1), ("temperature", "hot"), ("temperature", 1e400), ("top_p", 0),
        ("top_p", 1.01), ("top_k", -2), ("seed", -2), ("seed", 2**63),
        ("n", 0), ("n", 9), ("cfg_scale", 101),
        ("stop", ""), ("stop", ["a", ""]), ("stop", ["a"] * 17), ("stop", 3), ("stream", "yes"),
        ("stream", 1), ("sampler", ""), ("sampler", "x" * 401), ("steps", 0),
        ("logprobs", 2), ("top_logprobs", 21),
        ("messages", []), ("messages", "hi"), ("stream_options", []), ("constraints", {"a": "x"}),
        ("tools", 3), ("tool_choice", "never"), ("tool_choice", {"type": "function"}),
        ("chat_template_kwargs", []), ("deadline", 0), ("model", 3), ("cfg_scale", -1), ("user", 3),
        ("min_p", 2), ("logit_bias", {"a": 1}), ("logit_bias", {"5": 101}), ("logit_bias", [5]),
        ("frequency_penalty", 3), ("presence_penalty", "x"), ("repetition_penalty", 0),
    ],
)  # fmt: skip
def test_values_that_will_not_do_name_their_field(name: str, value: Any) -> None:
    problem = refused(read_chat, {"messages": HELLO, name: value})
    assert problem.param == name and problem.message.startswith(f"{name} must ")


def test_unknown_fields_are_never_ignored() -> None:
    problem = refused(read_chat, {"messages": HELLO, "temprature": 1})
    assert problem.code == "unknown_field" and "'temperature'" in problem.message
    problem = refused(
        read_chat, {"messages": HELLO, "stream": True, "stream_options": {"include_usag": True}}
    )
    assert "include_usage" in problem.message
    assert refused(read_infill, {"text": "[[1]]", "max_tokens": 3}).param == "max_tokens"


@pytest.mark.parametrize("body", [[], None, "x", 3, True])
def test_a_body_is_an_object(body: Any) -> None:
    for read in (read_chat, read_text, read_infill, ScoreBody.read):
        assert "JSON object" in refused(read, body).message


@pytest.mark.parametrize(
    ("read", "name"),
    [(read_chat, "messages"), (read_text, "prompt"), (read_infill, "text"),
     (ScoreBody.read, "continuation")],
)  # fmt: skip
def test_what_has_to_be_there(read: Any, name: str) -> None:
    problem = refused(read, {})
    assert (problem.param, problem.code) == (name, "missing_field")


def test_messages_are_strings_or_text_parts() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    ask = read_chat({"messages": [{"role": "developer", "content": "d"},
                                  {"role": "user", "content": parts, "name": "me"}]})  # fmt: skip
    assert ask.prompts[0] == [
        {"role": "system", "content": "d"}, {"role": "user", "content": "one two"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"role": "critic", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content"),
        ({"role": "assistant", "content": "", "tool_calls": [1]}, "messages[0].tool_calls[0]"),
    ],
)
def test_other_messages_are_refused(message: Any, param: str) -> None:
    assert refused(read_chat, {"messages": [message]}).param == param


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), ([1, 2, 3], 1), (["a", "b"], 2), ([[1, 2], [3]], 2)],
)
def test_prompts_of_completions(prompt: Any, count: int) -> None:
    ask = text(prompt=prompt, n=2)
    assert len(ask.prompts) == count and ask.choices == 2 * count
    assert ask.chat is False


@pytest.mark.parametrize("prompt", [[], 3, [1, "a"], ["a", 1], [[]], [1.5], [True], {"a": 1}])
def test_prompts_that_are_none(prompt: Any) -> None:
    assert refused(read_text, {"prompt": prompt}).param == "prompt"


def test_fields_that_need_one_another() -> None:
    assert refused(read_chat, {"messages": HELLO, "top_logprobs": 2}).param == "top_logprobs"
    assert chat(logprobs=True, top_logprobs=2).logprobs == 2
    assert chat(logprobs=False, top_logprobs=0).logprobs is None  # as clients send their defaults
    assert chat(logprobs=True).logprobs == 0 and chat().logprobs is None
    assert text(logprobs=0).logprobs == 0
    given = {"stream_options": {"include_usage": True}}
    assert "needs stream=true" in refused(read_chat, {"messages": HELLO, **given}).message
    assert text(suffix="b", stop="c").arguments["stop_strings"] == ("c",)  # as editors send both
    assert refused(read_text, {"prompt": "a", "suffix": "b", "min_tokens": 1}).param == "min_tokens"
    assert text(suffix="").suffix is None
    for given in ({"echo": True}, {"prompt_logprobs": 0}):  # there is no prompt beside the text
        assert refused(read_text, {"prompt": "a", "suffix": "b", **given}).param == "suffix"
    differ = {"max_tokens": 4, "max_completion_tokens": 5}
    assert "differ" in refused(read_chat, {"messages": HELLO, **differ}).message
    assert refused(read_text, {"prompt": ["a"] * 40, "n": 2}).param == "n"


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def test_forms_of_answers() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "A", "schema": SCHEMA}}
    for given, expected in (
        ({"response_format": wanted}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"response_format": {"type": "json_object", "schema": None, "json_schema": None}},
         {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: \"a\""}}, {"grammar": "start: \"a\""}),
        ({"structured_outputs": {"structural_tag": {"triggers": []}}},
         {"structural_tag": {"triggers": []}}),
        ({"response_format": {"type": "structural_tag", "triggers": ["<"], "structures": []}},
         {"structural_tag": {"triggers": ["<"], "structures": []}}),
    ):  # fmt: skip
        assert chat(**given).arguments == text(**given).arguments == expected
        assert chat(**given).form and chat().form is None
    for wrong, param in (
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": 5}}, "response_format"),
        ({"response_format": {"type": "json_object", "json_schema": "x"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": wanted}, "structured_outputs"),
        ({"structured_outputs": {"grammar": 5}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a" * 10**5}}, "structured_outputs.regex"),
        ({"tools": [ADD], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
         "tool_choice"),
    ):  # fmt: skip
        assert refused(read_chat, {"messages": HELLO, **wrong}).param == param


def test_tools() -> None:
    assert chat(tools=[ADD]).tools == [ADD] and chat(tools=[ADD]).tool_choice == "auto"
    assert chat(tools=[ADD], tool_choice="none").tools == []
    named = {"type": "function", "function": {"name": "add"}}
    assert chat(tools=[ADD], tool_choice=named, parallel_tool_calls=False).tool_choice == "add"
    for wrong in ({"tools": [ADD, ADD]}, {"tools": [{**ADD, "type": "x"}]},
                  {"tools": [{"type": "function", "function": {"name": "a b"}}]}):  # fmt: skip
        assert str(refused(read_chat, {"messages": HELLO, **wrong}).param).startswith("tools")
    other = {"type": "function", "function": {"name": "b"}}
    for wrong in ({"tool_choice": "required"}, {"tool_choice": named},
                  {"tools": [ADD], "tool_choice": other}):  # fmt: skip
        assert refused(read_chat, {"messages": HELLO, **wrong}).param == "tool_choice"
    for name in ("none", "auto", "required"):  # as a choice is called
        tool, wanted = ({"type": "function", "function": {"name": name}} for _ in range(2))
        asked = chat(tools=[ADD, tool], tool_choice=wanted)
        assert asked.forced and asked.tools == [tool]
        wrong = {"messages": HELLO, "tools": [ADD], "tool_choice": wanted}
        assert refused(read_chat, wrong).param == "tool_choice"
    assert refused(read_text, {"prompt": "a", "tools": [ADD]}).param == "tools"


def test_tools_and_a_form() -> None:
    """A call that has to be made is all of the answer; one that may be is one of two forms."""
    wanted = {"type": "json_schema", "json_schema": {"name": "A", "schema": SCHEMA}}
    asked = chat(tools=[ADD], response_format=wanted)
    assert asked.either and not asked.forced and asked.form != chat(response_format=wanted).form
    assert not chat(tools=[ADD], tool_choice="required", response_format=wanted).either
    assert not chat(tools=[ADD]).either and not chat(response_format=wanted).either


def test_an_answer_that_ignores_its_end_has_no_structure() -> None:
    """Beside stop strings ``ignore_eos`` was dropped without a word."""
    forms: tuple[Any, ...] = ({"response_format": {"type": "json_object"}},
                              {"tools": [ADD], "tool_choice": "required"})  # fmt: skip
    for form in forms:
        for more in ({}, {"stop": "x"}):
            wrong = {"messages": HELLO, "ignore_eos": True, "max_tokens": 9, **form, **more}
            problem = refused(read_chat, wrong)
            assert problem.param == "ignore_eos" and "a structure" in problem.message


def test_tools_that_are_allowed() -> None:
    other = {"type": "function", "function": {"name": "b"}}

    def allowed(mode: str, *names: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    asked = chat(tools=[ADD, other], tool_choice=allowed("auto", "b"))
    assert asked.tools == [other] and asked.tool_choice == "auto"
    assert chat(tools=[ADD, other], tool_choice=allowed("required", "add")).tools == [ADD]
    for choice in (allowed("auto", "c"), allowed("none", "add"), allowed("auto"),
                   {"type": "allowed_tools"}):  # fmt: skip
        wrong = {"messages": HELLO, "tools": [ADD, other], "tool_choice": choice}
        assert refused(read_chat, wrong).param == "tool_choice"


def test_what_clients_echo_of_other_servers_is_ignored() -> None:
    made = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "c1", "type": "function", "provider_specific_fields": {"a": 1},
            "function": made | {"parsed_arguments": {}}}  # fmt: skip
    part = {"type": "text", "text": "1 + 2?", "cache_control": {"type": "ephemeral"}}
    echoed = read_chat({
        "messages": [
            {"role": "user", "content": [part], "metadata": {"a": 1}, "id": "m1"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm",
             "provider_specific_fields": {"refusal": None}, "annotations": [], "audio": None,
             "function_call": None},
            {"role": "tool", "tool_call_id": "c1", "content": "3", "cache_control": {}},
            {"role": "assistant", "content": None, "refusal": "no"},
        ],
        "tools": [{**ADD, "cache_control": {}, "function": {**ADD["function"], "metadata": {}}}],
    })  # fmt: skip
    plain = read_chat({
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "c1", "function": made}]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
            {"role": "assistant", "content": ""},
        ],
        "tools": [ADD],
    })  # fmt: skip
    assert echoed == plain
    assert plain.prompts[0][1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "there"),
    [("regex", "structured_outputs"), ("grammar", "grammar"),
     ("json_schema", "response_format"), ("stop_strings", "stop"),
     ("max_new_tokens", "max_tokens"), ("max_length", "max_tokens"),
     ("guidance_scale", "cfg_scale"),
     ("num_inference_steps", "steps"), ("temprature", "temperature")],
)  # fmt: skip
def test_suggestions_are_fields_of_a_body(name: str, there: str) -> None:
    message = refused(read_chat, {"messages": HELLO, name: 3}).message
    assert there in message and "guided" not in message


def test_suggestions_never_name_what_is_refused() -> None:
    for name in ("plugins", "function", "guided", "audios", "bad_word", "beam_search"):
        message = refused(read_chat, {"messages": HELLO, name: 3}).message
        hint = message.partition("known:")[0]
        assert not any(f"'{other}'" in hint for other in REFUSED if other != name), message


def test_errors_use_the_words_of_a_body() -> None:
    both = {"max_tokens": 4, "min_tokens": 5}
    message = refused(read_chat, {"messages": HELLO, **both}).message
    assert message == "min_tokens=5 exceeds max_tokens=4"
    assert in_http("stop_strings, json_schema and initial_text") == (
        "stop, response_format and initial_text"
    )


def test_scores() -> None:
    body = ScoreBody.read({"messages": HELLO, "continuation": ["x"], "samples": 8, "seed": 3})
    assert body.question == HELLO and body.scoring == {"samples": 8, "seed": 3}
    body = ScoreBody.read({"continuation": "x", "prompt": "a", "messages": HELLO})
    with pytest.raises(Problem, match="keep one"):
        _ = body.question
