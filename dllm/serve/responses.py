"""``/v1/responses``, OpenAI's second API for chats: a text or items in, items out, and a stream of
named events.  Nothing is kept between requests."""

import itertools
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from ..core.config import Count
from . import bodies
from .bodies import MOST_TOOLS
from .body import UNFIT, Body, Echoed, Must
from .http import event
from .problems import Problem, invalid, unsupported
from .replies import Choice, Reply, chat_logprobs, entries, figures, message, usage
from .requests import GenerateRequest, chat_request

CHAT = "use /v1/chat/completions"
ELSEWHERE = {"max_tokens": "max_output_tokens", "response_format": "text.format"}
UNKEPT = "answers are not kept: send the whole conversation as input"
ARGUMENTS = "response.function_call_arguments"
LIKELY = "message.output_text.logprobs"
Included = Literal["reasoning.encrypted_content", "message.output_text.logprobs"]


class Item(Echoed):
    """Of the input of ``/v1/responses``: a message, earlier thoughts and calls, a tool's result."""

    type: Annotated[
        Literal["message", "reasoning", "function_call", "function_call_output"],
        Must("message, reasoning, function_call or function_call_output: this model reads text "
             "only, and no items are kept"),
    ] = "message"  # fmt: skip
    role: bodies.Role = "assistant"
    content: bodies.Content = ""
    name: str = ""
    arguments: str = ""
    call_id: str = ""
    output: bodies.Content = ""
    summary: list[bodies.Part] | None = None


class FlatTool(bodies.Function):
    """A tool of ``/v1/responses``."""

    type: bodies.FunctionOnly = "function"


class TextFormat(Body):
    """The form of an answer of ``/v1/responses``."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema_: bodies.Values | None = Field(default=None, alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    """``text`` of ``/v1/responses``."""

    format: TextFormat | None = None
    verbosity: str | None = None


def _items(given: Any) -> Any:
    if not isinstance(given, str | list):
        raise PydanticCustomError(UNFIT, "must be a string, or items")
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponseBody(bodies.Spoken):
    """``POST /v1/responses``: a text or items in, items out.  Nothing is kept: every request brings
    the whole conversation as ``input``."""

    input: Annotated[
        list[Item],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_items, json_schema_input_type=str | list[Item]),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[FlatTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    text: TextOptions | None = None
    reasoning: bodies.Values | None = None
    include: Annotated[list[Included], Field(fail_fast=True)] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"
    top_logprobs: bodies.Alternatives = 0
    max_tool_calls: Count | None = None
    client_metadata: bodies.Values | None = None  # what Codex says of itself
    REFUSED = bodies.Spoken.REFUSED | {
        "previous_response_id": (UNKEPT, ()),
        "conversation": (UNKEPT, ()),
        "prompt": ("prompts are not kept: send the text as input", ()),
        "background": (UNKEPT, (False,)),
        "n": ("there is one answer", (1,)),
        "trace": (CHAT, (False,)),
        "return_token_ids": (CHAT, (False,)),
        "prompt_logprobs": (CHAT, ()),
        **{name: (f"here it is {here}", ()) for name, here in ELSEWHERE.items()},
    }


# Of a delta: the name of a text -> the kind of item and of part that it stands in.
PARTS = (
    ("reasoning_content", "reasoning", "reasoning_text"),
    ("content", "message", "output_text"),
)
LOGPROBS: dict[str, dict[str, Any]] = {"output_text": {"logprobs": []}, "reasoning_text": {}}
NEEDED = {"message": ("content",), "function_call": ("call_id", "name", "arguments"),
          "function_call_output": ("call_id", "output")}  # fmt: skip
REPEATED = ("instructions", "max_output_tokens", "max_tool_calls", "metadata",
            "parallel_tool_calls", "reasoning", "temperature", "top_logprobs", "top_p",
            "truncation", "user")  # fmt: skip
NAMES = {"message": "msg", "reasoning": "rs"}  # what ids of items begin with


def messages_of(items: list[Item]) -> list[dict[str, Any]]:
    """The items of ``/v1/responses`` as chat templates know them: thoughts, text and calls of an
    answer are one message.  Of thoughts that have no content, the summary is taken."""
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        for name in NEEDED.get(item.type, ()):
            if name not in item.given:
                where = f"input[{at}].{name}"
                raise Problem(400, f"{where} is missing", where, "missing_field")
        text = bodies.Message(role=item.role, content=item.content).shown(f"input[{at}]")
        if item.type == "function_call_output":
            output = bodies.Message(role="tool", content=item.output, tool_call_id=item.call_id)
            messages.append(output.shown(f"input[{at}]"))
        elif item.type == "message" and item.role != "assistant":
            messages.append(text)
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            last = messages[-1]
            if item.type == "message":
                last["content"] += text["content"]
            elif item.type == "reasoning":
                thought = text["content"] or "\n".join(part.text for part in item.summary or ())
                last["reasoning_content"] = last.get("reasoning_content", "") + thought
            else:
                function = {"name": item.name, "arguments": bodies.json_or_text(item.arguments)}
                call = {"type": "function", "function": function}
                last.setdefault("tool_calls", []).append(call)
    return messages


def read_response(data: Any) -> GenerateRequest:
    """``POST /v1/responses``."""
    body = ResponseBody.read(data)
    if body.stream_options and body.stream_options.given.keys() - {"include_obfuscation"}:
        raise unsupported("stream_options", "a response has its usage, and no frames of the "
                          f"canvas: {CHAT}")  # fmt: skip
    before = [{"role": "system", "content": body.instructions}] if body.instructions else []
    flat = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        for tool in flat
    ]
    form = body.text.format if body.text and body.text.format else TextFormat()
    body.response_format = {"type": form.type, "json_schema": {"schema": form.schema_}}
    if form.type == "json_schema" and form.schema_ is None:
        raise Problem(400, "text.format.schema is missing", "text.format.schema", "missing_field")
    if form.type == "text" and form.schema_ is not None:
        raise invalid("text.format.type", "text.format has a schema: type must be 'json_schema'")
    wanted = body.top_logprobs if body.top_logprobs or LIKELY in body.include else None
    ask = chat_request(
        body, before + messages_of(body.input), body.max_output_tokens, tools, body.max_tool_calls,
        logprobs=wanted, truncate="auto" if body.truncation == "auto" else 0,
    )  # fmt: skip
    shown = {name: body.value(name) for name in REPEATED}
    shown |= {"tools": [{"parameters": None, "strict": None} | tool for tool in flat],
              "tool_choice": body.tool_choice or "auto", "store": False,
              "text": {"format": form.model_dump(exclude_none=True, by_alias=True)}}  # fmt: skip
    return replace(ask, response=shown, include_usage=True)


@dataclass(frozen=True)
class ResponseReply(Reply):
    """As `Reply`, in items and events of ``/v1/responses``."""

    id: str = field(default_factory=lambda: _name("resp"))
    items: list[dict[str, Any]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    end = b""

    @staticmethod
    def encode(value: Mapping[str, Any]) -> bytes:
        return f"event: {value['type']}\n".encode() + event(value)

    def failure(self, problem: Problem) -> bytes:
        told = problem.body()["error"]
        about = {name: told[name] for name in ("code", "message", "param")}
        return self.encode(self._event("error", error=told, **about))

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        (choice,) = choices
        if not self.items:  # not streamed
            self.chunk(0, message(choice), True)
            self._close(choice)
        status = _status(choice)
        cut = {"incomplete_details": {"reason": "max_output_tokens"}}
        used = usage(self.ask, [choice.result])
        return self._response() | (cut if status == "incomplete" else {}) | {
            "status": status,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {**used["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
            "dllm": figures([choice.result]),
        }  # fmt: skip

    def opening(self) -> list[dict[str, Any]]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, response=self._response()) for name in names]

    def chunk(self, index: int, delta: Mapping[str, Any], first: bool) -> list[dict[str, Any]]:
        events = []
        for name, kind, part in PARTS:
            text = delta.get(name)
            if text is None or (name != "content" and not text):
                continue
            if not self.items or self.items[-1]["type"] != kind:
                events += self._close() + self._open(kind, part)
            self.items[-1]["content"][0]["text"] += text
            events.append(self._inside(f"response.{part}.delta", delta=text, **LOGPROBS[part]))
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                events += self._close()
                item = {"type": "function_call", "id": _name("fc"), "call_id": call["id"],
                        "name": function["name"], "arguments": "",
                        "status": "in_progress"}  # fmt: skip
                events.append(self._added(item))
            self.items[-1]["arguments"] += function["arguments"]
            if function["arguments"]:
                events.append(self._inside(f"{ARGUMENTS}.delta", delta=function["arguments"]))
        return events

    def last(self, index: int, choice: Choice) -> list[dict[str, Any]]:
        return self._close(choice)

    def totals(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        body = self.body(choices)
        return [self._event(f"response.{body['status']}", response=body)]

    def _response(self) -> dict[str, Any]:
        assert self.ask.response is not None
        return {
            "id": self.id, "object": "response", "created_at": self.created, "model": self.model,
            "status": "in_progress", "error": None, "incomplete_details": None,
            "output": [dict(item) for item in self.items], "previous_response_id": None,
            "background": False, "usage": None, **self.ask.response,
        }  # fmt: skip

    def _open(self, kind: str, part: str) -> list[dict[str, Any]]:
        """Begin an item with text in it."""
        item: dict[str, Any] = {"type": kind, "id": _name(NAMES[kind]), "status": "in_progress",
                                "content": []}  # fmt: skip
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= more
        begun = [self._added(item)]
        notes: dict[str, Any] = {"annotations": []} if kind == "message" else {}
        item["content"] = [{"type": part, "text": "", **notes, **LOGPROBS[part]}]
        return [*begun, self._inside("response.content_part.added", part=dict(item["content"][0]))]

    def _close(self, choice: Choice | None = None) -> list[dict[str, Any]]:
        """The item at the end, if it is open, has come to its end; ``choice``: so has the answer,
        whose log-probabilities come together."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item, events = self.items[-1], []
        for part in item.get("content", ()):
            kind, text = part["type"], part["text"]
            if choice is not None and self.ask.logprobs is not None and kind == "output_text":
                found = entries(choice, self.ask, self.spelling)
                part["logprobs"] = chat_logprobs(found, self.name)
            likely = {name: part[name] for name in LOGPROBS[kind]}
            events.append(self._inside(f"response.{kind}.done", text=text, **likely))
            events.append(self._inside("response.content_part.done", part=part))
        if "arguments" in item:
            told = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._inside(f"{ARGUMENTS}.done", **told))
        item["status"] = "completed" if choice is None else _status(choice)
        place = {"output_index": len(self.items) - 1, "item": dict(item)}
        return [*events, self._event("response.output_item.done", **place)]

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        self.items.append(item)
        place = {"output_index": len(self.items) - 1, "item": dict(item)}
        return self._event("response.output_item.added", **place)

    def _inside(self, kind: str, **more: Any) -> dict[str, Any]:
        """An event of the item at the end."""
        where = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        within = {} if "arguments" in kind else {"content_index": 0}
        return self._event(kind, **where, **within, **more)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self.numbers), **more}


def in_responses(problem: Problem) -> Problem:
    """``problem`` with the names of fields here, unless the client sent the other ones."""
    if problem.param not in ELSEWHERE:
        for name, here in ELSEWHERE.items():
            problem.message = re.sub(rf"\b{name}\b", here, problem.message)
    return problem


def _name(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _status(choice: Choice) -> str:
    return "incomplete" if choice.result.finish_reason == "length" else "completed"
