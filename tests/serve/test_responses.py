"""``/v1/responses`` by the real OpenAI client: texts, items, streams, calls of tools, refusals."""

import json
from typing import Any

import pydantic
import pytest

import dllm
from dllm.serve.problems import Problem
from dllm.serve.requests import GenerateRequest
from dllm.serve.responses import ResponseReply, read_response

from ..thin import some
from .conftest import Served, Start

ASK = "Reverse this list: Tom, Anna, Ben"
HOW: dict[str, Any] = {
    "model": "tiny", "max_output_tokens": 24, "extra_body": {"block_length": 8}
}  # fmt: skip
TOOL: Any = {
    "type": "function", "name": "add", "description": "adds", "strict": True,
    "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                   "additionalProperties": False},
}  # fmt: skip


def expected(tiny: dllm.DiffusionModel, prompt: Any, **how: Any) -> dllm.Result:
    result: dllm.Result = dllm.generate(tiny, prompt, max_new_tokens=24, block_length=8, **how)
    return result


def test_a_text(served: Served, tiny: dllm.DiffusionModel) -> None:
    plain = expected(tiny, [{"role": "user", "content": ASK}])
    create, of_codex = served.client().responses.create, {"client_metadata": {"x": "y"}}
    answer = create(input=ASK, **HOW | {"extra_body": HOW["extra_body"] | of_codex})
    assert answer.output_text == plain.text
    assert answer.status == {"stop": "completed", "length": "incomplete"}[plain.finish_reason]
    assert answer.output[-1].status == answer.status
    assert answer.usage is not None
    assert answer.usage.input_tokens == plain.prompt_length
    assert answer.usage.output_tokens == len(plain.tokens)
    assert answer.id.startswith("resp_") and answer.previous_response_id is None
    assert (answer.model_extra or {})["dllm"]["forwards"] == plain.nfe


def test_items_are_a_conversation(served: Served, tiny: dllm.DiffusionModel) -> None:
    client = served.client()
    first = client.responses.create(input=ASK, **HOW)
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": ASK}]}, *first.output,
        {"type": "message", "role": "user", "content": "one"},
    ]  # fmt: skip
    second = client.responses.create(input=items, instructions="two", **HOW)
    messages = [
        {"role": "system", "content": "two"}, {"role": "user", "content": ASK},
        {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "one"},
    ]  # fmt: skip
    assert second.output_text == expected(tiny, messages).text
    assert second.instructions == "two"


@pytest.mark.parametrize("thought", [
    {"summary": [], "content": [{"type": "reasoning_text", "text": "add"}]},
    {"summary": [{"type": "summary_text", "text": "add"}]},
    {"summary": [{"type": "summary_text", "text": "sum"}], "content": "add"},
])  # fmt: skip
def test_calls_and_what_they_returned_become_messages(thought: Any) -> None:
    ask = read_response({"input": [
        {"role": "user", "content": "1 + 2?"},
        {"type": "reasoning", "id": "r", **thought},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]})  # fmt: skip
    assert ask.prompts == [[
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "reasoning_content": "add", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]]  # fmt: skip


def test_a_stream_has_openais_events(served: Served) -> None:
    whole = served.client().responses.create(input=ASK, **HOW)
    events: Any = list(served.client().responses.create(input=ASK, stream=True, **HOW))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", f"response.{whole.status}",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text == events[-1].response.output_text
    assert events[-1].response.usage == whole.usage
    with served.client().responses.stream(input=ASK, **HOW) as stream:
        for _ in stream:
            pass
    import openai  # takes a second

    late = {"sampler": "llada(steps=1)", "block_length": 4}  # refused by the first step
    for more in ({"temperature": -1}, late):
        with pytest.raises(openai.BadRequestError):
            served.client().responses.create(input=ASK, stream=True, **HOW | {"extra_body": more})


@pytest.mark.parametrize("choice", some([{"type": "function", "name": "add"}, "required"], 1))
def test_a_call_of_a_tool(start: Start, choice: Any) -> None:
    served = start(dllm.load("nano"), name="tiny")  # has room for a tool
    how = {**HOW, "tools": [TOOL], "tool_choice": choice, "max_output_tokens": 64}
    (call,) = served.client().responses.create(input="one", **how).output
    assert call.type == "function_call" and call.name == "add"
    assert json.loads(call.arguments)["a"] in (1, 2)
    events: Any = list(served.client().responses.create(input="one", stream=True, **how))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [call.arguments]
    assert events[-1].response.output[0].arguments == call.arguments


def test_a_form(served: Served) -> None:
    class Answer(pydantic.BaseModel):
        sure: bool

    parsed = served.client().responses.parse(
        model="tiny", input="one", text_format=Answer, max_output_tokens=32
    )
    assert isinstance(parsed.output_parsed, Answer) and parsed.status == "completed"


@pytest.mark.parametrize(
    ("more", "param", "word"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ({"conversation": "c"}, "conversation", "whole conversation"),
        ({"background": True}, "background", "not kept"), ({"input": 5}, "input", "items"),
        ({"input": [{"type": "input_image"}]}, "input[0].type", "text only"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content", "text parts"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", 'must be "function"'),
        ({"tools": [TOOL, {"type": "code_interpreter", "container": {"type": "auto"}}]},
         "tools[1].type", "client runs"),
        ({"input": [{"type": "reasoning", "summary": ["add"]}]}, "input[0].summary[0]", "object"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]},
         "input[0].arguments", "missing"),
        ({"input": [{"type": "function_call_output", "output": "5"}]}, "input[0].call_id",
         "missing"),
        ({"max_tokens": 5}, "max_tokens", "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
        ({"text": {"format": {"schema": {}}}}, "text.format.type", "must be 'json_schema'"),
        ({"stream": True, "stream_options": {"include_drafts": True}}, "stream_options", "canvas"),
        ({"inputs": "x"}, "inputs", "did you mean"), ({"include": ["x"]}, "include[0]", "logprobs"),
    ],
)  # fmt: skip
def test_refusals(more: Any, param: str, word: str) -> None:
    with pytest.raises(Problem) as caught:
        read_response({"input": "hi", **more})
    assert caught.value.param == param and word in caught.value.message


def test_an_error_in_a_stream_is_an_event() -> None:
    ask = GenerateRequest(kind="chat", prompts=["x"], response={})
    reply = ResponseReply(ask, "m", "fp", str, id="resp_1")
    kinds = [one["type"] for one in reply.opening()]
    assert kinds == ["response.created", "response.in_progress"]
    name, told = reply.failure(Problem(504, "too late")).decode().strip().split("\n")
    assert name == "event: error" and json.loads(told.removeprefix("data: ")) == {
        "type": "error", "sequence_number": 2, "code": None, "message": "too late", "param": None,
        "error": {"message": "too late", "type": "timeout_error", "param": None, "code": None},
    }  # fmt: skip
    thought = reply.chunk(0, {"reasoning_content": "hm"}, True)
    text = reply.chunk(0, {"content": "yes"}, False)
    assert thought[-1]["type"] == "response.reasoning_text.delta"
    assert [one["type"] for one in text][:3] == [
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done"
    ]  # fmt: skip
    assert [item["type"] for item in reply.items] == ["reasoning", "message"]
