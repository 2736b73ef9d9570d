"""Answers with a form over HTTP: expressions, choices, JSON, calls of tools."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

import dllm
from dllm.serve.requests import read_chat
from dllm.serve.tools import syntax_of

from .conftest import Served, Start, deltas

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "one"}]
HOW: Any = {"messages": HELLO, "max_tokens": 24, "block_length": 8}


def content(served: Served, **more: Any) -> str:
    answer = served.post(CHAT, HOW | more)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_expressions_and_choices(served: Served, tiny: dllm.DiffusionModel) -> None:
    """The same text as in a program, and one of the form; streamed, too."""
    regex = "[0-9]{2}-[a-z]{3}"
    text = content(served, structured_outputs={"regex": regex})
    assert re.fullmatch(regex, text)
    assert text == dllm.generate(tiny, HELLO, regex=regex, max_new_tokens=24, block_length=8).text
    body = {**HOW, "structured_outputs": {"regex": regex}, "stream": True, "temperature": 1,
            "seed": 3}  # fmt: skip
    parts = deltas(served.post(CHAT, body))
    assert re.fullmatch(regex, "".join(part.get("content") or "" for part in parts))
    assert content(served, structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    plain = {"prompt": "one", "max_tokens": 24, "structured_outputs": {"choice": ["a", "b"]}}
    assert served.post(TEXT, plain).json()["choices"][0]["text"] in ("a", "b")


def test_what_cannot_be_is_refused(served: Served) -> None:
    for regex, word in (("(", "not well formed"), ("a{200}", "max_tokens is 24"),
                        (r"(a)\1", "references")):  # fmt: skip
        answer = served.post(CHAT, {**HOW, "structured_outputs": {"regex": regex}})
        assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text
    schema = {"type": "json_schema", "json_schema": {"schema": {"const": "a" * 99}, "name": "a"}}
    answer = served.post(CHAT, {**HOW, "response_format": schema})
    assert "a text of this schema has at least" in answer.json()["error"]["message"]


def test_a_stop_string_beside_a_form(served: Served) -> None:
    """One that cannot occur changes nothing; one that does ends the text."""
    form = {"structured_outputs": {"regex": "[0-9]{2}-[0-9]{2}"}}
    plain = content(served, **form)
    assert content(served, **form, stop=["Observation:", "\n\n"]) == plain
    assert content(served, **form, stop="-") == plain[:2]


def test_a_hostile_structure_holds_nobody_up(served: Served) -> None:
    """While it is compiled, and given up, ordinary requests are answered."""
    hostile = {**HOW, "structured_outputs": {"json": {"type": "string", "minLength": 10**9}}}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(served.post, CHAT, hostile)
        answered = 0
        while answered < 3 and not waiting.done():
            assert served.post(CHAT, HOW).status_code == 200
            answered += not waiting.done()
    refused = waiting.result()
    assert refused.status_code == 400 and "allow less" in refused.json()["error"]["message"]
    assert answered == 3


class Person(pydantic.BaseModel):
    name: str
    age: int


def test_parse_of_the_openai_package(served: Served) -> None:
    """A pydantic class in, an object of it out."""
    answer = served.client().chat.completions.parse(
        model="tiny", messages=HELLO, max_tokens=48, response_format=Person,
        extra_body={"block_length": 16},
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Person)
    plain = content(served, max_tokens=48, block_length=16,
                    structured_outputs={"json": Person.model_json_schema()})  # fmt: skip
    assert Person.model_validate_json(plain)


CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {
            "type": "object", "required": ["a", "b"], "additionalProperties": False,
            "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
        },
    },
}  # fmt: skip


def test_an_agent_loop(start: Start) -> None:
    """`nano` is made to call a calculator; what that returns goes back, and it answers."""
    served = start(dllm.load("nano"), name="nano")
    messages: list[Any] = [{"role": "user", "content": "What is 23 + 12?"}]
    ask = served.client().chat.completions.create
    named: Any = {"type": "function", "function": {"name": "calculator"}}
    for choice in ("required", named):
        answer = ask(model="nano", messages=messages, tools=[CALCULATOR], tool_choice=choice,
                     max_tokens=64).choices[0]  # fmt: skip
        (call,) = answer.message.tool_calls or []
        assert call.type == "function" and call.function.name == "calculator"
        assert answer.message.content is None
        assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
        numbers = json.loads(call.function.arguments)
        assert set(numbers) == {"a", "b"} and all(0 <= n <= 99 for n in numbers.values())
    twice = syntax_of("").schema([CALCULATOR], "required", several=True)
    one = {"name": "calculator", "arguments": numbers}
    for made, fits in ((one, True), ([one, one], True), ([one], False), ([], False)):
        assert jsonschema.Draft202012Validator(twice).is_valid(made) == fits
    short = "a text of this schema has at least [0-9]+ tokens, max_tokens is 4: raise it"
    with pytest.raises(openai.BadRequestError, match=short):
        ask(model="nano", messages=messages, tools=[CALCULATOR], tool_choice=named, max_tokens=4)
    many = ask(model="nano", messages=messages, tools=[CALCULATOR], tool_choice="required",
               max_tokens=96, parallel_tool_calls=True, temperature=1, seed=2)  # fmt: skip
    assert all(c.function.name == "calculator" for c in many.choices[0].message.tool_calls)
    asked = read_chat({"messages": messages, "tools": [CALCULATOR], "tool_choice": "required",
                       "parallel_tool_calls": True})  # fmt: skip
    reader = served.service.chats.parser(asked, [])
    assert reader is not None
    reader.feed(json.dumps([one, one]))
    reader.end()
    assert [json.loads(made.arguments) for made in reader.said.calls] == [numbers, numbers]
    chunks = list(ask(model="nano", messages=messages, tools=[CALCULATOR], max_tokens=64,
                      tool_choice="required", stream=True))  # fmt: skip
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    pieces = [c.function.arguments for c in calls if c.function]
    assert "".join(map(str, pieces)) == call.function.arguments and len(pieces) > 1
    named = [bool(c.id and c.type and c.function and c.function.name) for c in calls]
    assert named == [i == 0 for i in range(len(calls))] and {c.index for c in calls} == {0}
    result = str(numbers["a"] + numbers["b"])
    messages += [answer.message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": call.id, "content": result}]  # fmt: skip
    final = ask(model="nano", messages=messages, max_tokens=16).choices[0]
    assert final.message.content is not None and not final.message.tool_calls


def test_log_probabilities_of_an_answer_with_a_form(start: Start) -> None:
    """They are those of the tokens among the valid completions, as in the library."""
    model = dllm.load("nano")
    answer = start(model, name="nano").client().chat.completions.create(
        model="nano", messages=[{"role": "user", "content": "What is 23 + 12?"}], max_tokens=16,
        logprobs=True, top_logprobs=2, extra_body={"structured_outputs": {"regex": "[0-9]{2}"}},
    ).choices[0]  # fmt: skip
    assert answer.logprobs is not None and answer.logprobs.content is not None
    said = answer.logprobs.content
    assert "".join(one.token for one in said) == answer.message.content
    plain = dllm.generate(model, "What is 23 + 12?", regex="[0-9]{2}", max_new_tokens=16)
    assert plain.text == answer.message.content
    assert [one.logprob for one in said] == pytest.approx(
        plain.logprobs[: len(said)].tolist(), abs=1e-6
    )
    assert all(len(one.top_logprobs) == 2 for one in said)
