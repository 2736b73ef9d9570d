"""The bodies of requests: which fields are honoured, which change nothing, which are refused.

Fields that are annotated with `Only` are accepted where they change nothing, such as
``frequency_penalty`` 0, and refused elsewhere with the reason.  A field that no class here has is
refused as well: nothing is ignored silently.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from ..core.config import FILTERS, Count, GenerationConfig, Number
from ..core.declared import ANSWER, HOLES
from .body import Body, Must, Only
from .problems import Problem
from .wire import LONGEST_STOP, MOST_HOLES, SPEC, is_spec

LONGEST_FORM = 65_536  # characters of a schema or an expression
MOST_CHOICES = 8
MOST_CHOICES_OF_TEXT = 1024
MOST_TEXTS = 64
SYSTEM = {"developer": "system"}  # what OpenAI calls it now -> what chat templates know
MOST_TOOLS = 128

STRING = {"type": "string"}


class Part(BaseModel):
    """A text in the content of a message; what else stands there, such as annotations, says nothing
    to a model."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict) and len(json.dumps(value)) <= LONGEST_FORM


def _is_response_format(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return _is_tag(value) or value in ({"type": "text"}, {"type": "json_object"})
    given = value.get("json_schema")
    return isinstance(given, dict) and _is_schema(given.get("schema"))


def _is_tag(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "structural_tag" and _is_schema(value)


def _is_tool_choice(value: Any) -> bool:
    if isinstance(value, dict):
        function = value.get("function", value)
        return value.get("type") == "function" and isinstance(function, dict) and (
            isinstance(function.get("name"), str)
        )  # fmt: skip
    return value in ("none", "auto", "required")


Seconds = Annotated[float, Field(gt=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Alternatives = Annotated[int, Field(ge=0, le=20)]
Ids = Annotated[list[int], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Digits = Annotated[str, Field(pattern="^[0-9]{1,7}$")]
Sampler = Annotated[
    str,
    Must(SPEC.kind, is_spec, STRING),
]  # fmt: skip
Prompt = Annotated[
    str | Ids | Annotated[list[str] | list[Ids], Field(min_length=1, max_length=MOST_TEXTS)],
    Field(description=f"a string, token ids, or a list of at most {MOST_TEXTS} of either"),
]
Holed = Annotated[
    str,
    Must(f"a string with at most {MOST_HOLES} holes such as [[8]]",
         lambda v: isinstance(v, str) and v.count("[[") <= MOST_HOLES, STRING),
]  # fmt: skip
Continuation = Annotated[
    str | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)],
    Field(description=f"a string or 1 to {MOST_TEXTS} strings"),
]
Content = Annotated[
    str | list[Part], Field(description="a string or text parts: this model reads text only")
]
Drafts = Annotated[bool | Literal["text"], Field(description="true, false or 'text'")]
Choice = Annotated[
    list[Text],
    Field(min_length=1, max_length=MOST_CHOICES_OF_TEXT,
          description=f"a list of 1 to {MOST_CHOICES_OF_TEXT} strings"),
]  # fmt: skip
Schema = Annotated[
    dict[str, Any],
    Must(f"a JSON schema of at most {LONGEST_FORM} characters", _is_schema, {"type": "object"}),
]
ResponseFormat = Annotated[
    Any,
    Must('{"type": "text"}, {"type": "json_object"}, {"type": "structural_tag", "structures": ..., '
         '"triggers": ...} or {"type": "json_schema", "json_schema": '
         f'{{"name": ..., "schema": ...}}}} of at most {LONGEST_FORM} characters',
         _is_response_format, {"type": "object"}),
]  # fmt: skip
ToolChoice = Annotated[
    Any,
    Must('"none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
         _is_tool_choice, {"anyOf": [STRING, {"type": "object"}]}),
]  # fmt: skip
Role = Literal["system", "developer", "user", "assistant", "tool"]


class CalledFunction(Body):
    """Which tool was called; ``arguments`` is JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that an answer made."""

    id: str = ""
    type: Literal["function"] = "function"
    index: Number = 0
    function: CalledFunction


class Message(Body):
    """What somebody says.  ``tool_calls`` and ``reasoning_content`` are of answers,
    ``tool_call_id`` of what a tool returned."""

    role: Role
    content: Content | None = None
    name: str = ""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str = ""
    reasoning_content: str = ""

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, data: Any) -> Any:
        """Clients that repeat an answer send its empty fields along."""
        if not isinstance(data, dict):
            return data
        kept = ("role", "content")
        return {k: v for k, v in data.items() if k in kept or v not in (None, [], "")}

    def shown(self, where: str) -> dict[str, Any]:
        """The message as chat templates know it, which want arguments as an object."""
        content = self.content
        if content is None:
            if not self.tool_calls:
                raise Problem(400, f"{where}.content must be a string or text parts",
                              f"{where}.content", "invalid_value")  # fmt: skip
            content = ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        result: dict[str, Any] = {"role": SYSTEM.get(self.role, self.role), "content": content}
        for name in ("tool_call_id", "reasoning_content") + ("name",) * (self.role == "tool"):
            if getattr(self, name):
                result[name] = getattr(self, name)
        if self.tool_calls:
            result["tool_calls"] = [
                {"type": "function", "function": {
                    "name": call.function.name, "arguments": parsed(call.function.arguments)
                }} for call in self.tool_calls
            ]  # fmt: skip
        return result


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


Messages = Annotated[list[Message], Field(min_length=1)]


class Function(Body):
    """A tool; ``parameters`` is a JSON schema."""

    name: Annotated[
        str,
        Field(pattern="^[a-zA-Z0-9_-]{1,64}$",
              description="a name of 1 to 64 letters, digits, _ and -"),
    ]  # fmt: skip
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


FunctionOnly = Annotated[
    Literal["function"],
    Field(description='"function", a tool that the client runs (this server runs none)'),
]


class Tool(Body):
    """What an answer may call."""

    type: FunctionOnly = "function"
    function: Function


class StreamOptions(Body):
    """What a stream brings beside the text."""

    include_obfuscation: Annotated[Any, Only("nothing is padded", False)] = None

    include_usage: bool = False
    include_drafts: Drafts = False
    continuous_usage_stats: bool = False


class Decoding(Body):
    """How an answer is written."""

    # The last is refused with a reason.
    TAKES: ClassVar[Collection[str]] = (*GenerationConfig.fields(HOLES), "eos_policy")

    model: str | None = None
    sampler: Sampler | None = None
    cache: str | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    deadline: Seconds | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    trace: bool = False


GUIDED = "use structured_outputs, with regex, choice, json, grammar or structural_tag"
TOOLS = "describe them as tools"
OTHER = "it has no meaning for a text model"
OTHER_FILTERS = f"use one of {', '.join(FILTERS)}"
COMPLETE = "the last message is complete: use /v1/completions"
ENCODED = "a prompt is encoded as the model expects"
SPECIAL = "special tokens are not text"


class StructuredOutputs(Body):
    """The form of an answer, as vLLM calls it: one of these."""

    regex: Annotated[str, Field(min_length=1, max_length=LONGEST_FORM)] | None = None
    choice: Choice | None = None
    schema_: Schema | None = Field(default=None, alias="json")
    grammar: Annotated[str, Field(min_length=1, max_length=LONGEST_FORM)] | None = None
    structural_tag: Schema | None = None


class Writing(Decoding):
    """Answers of a length that is asked for, and what OpenAI's and vLLM's clients send beside."""

    TAKES = GenerationConfig.fields(ANSWER)

    ignore_eos: bool = False
    diffusing: bool = False

    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    length_penalty: Annotated[Any, Only("there are no beams", 1, 1.0)] = None
    bad_words: Annotated[Any, Only("words cannot be forbidden", [])] = None
    stop_token_ids: Annotated[Any, Only("stop ids are the model's own: use stop", [])] = None
    typical_p: Annotated[Any, Only(OTHER_FILTERS, 1, 1.0)] = None
    best_of: Annotated[Any, Only("use n", 1)] = None
    use_beam_search: Annotated[Any, Only("there are no beams", False)] = None
    include_stop_str_in_output: Annotated[
        Any, Only("a stop string is never part of the text", False)
    ] = None
    skip_special_tokens: Annotated[Any, Only(SPECIAL, True)] = None
    spaces_between_special_tokens: Annotated[Any, Only(SPECIAL, True)] = None
    add_special_tokens: Annotated[Any, Only(ENCODED, True)] = None
    add_generation_prompt: Annotated[Any, Only(COMPLETE, True)] = None
    continue_final_message: Annotated[Any, Only(COMPLETE, False)] = None
    detokenize: Annotated[Any, Only("answers are text: return_token_ids adds the ids", True)] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[Any, Only(GUIDED)] = None
    guided_regex: Annotated[Any, Only(GUIDED)] = None
    guided_choice: Annotated[Any, Only(GUIDED)] = None
    guided_grammar: Annotated[Any, Only(GUIDED)] = None
    functions: Annotated[Any, Only(TOOLS, [])] = None
    function_call: Annotated[Any, Only(TOOLS, "none", "auto")] = None
    web_search_options: Annotated[Any, Only(TOOLS)] = None
    store: Annotated[Any, Only("nothing is stored", False)] = None
    modalities: Annotated[Any, Only(OTHER, ["text"])] = None
    audio: Annotated[Any, Only(OTHER)] = None
    prediction: Annotated[
        Any, Only("begin with a draft, initial_text, or fix parts with constraints")
    ] = None
    moderation: Annotated[Any, Only(OTHER)] = None
    priority: Annotated[Any, Only("requests are served in the order they come", 0)] = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    request_id: str | None = None


class Spoken(Writing):
    """What a chat has, however it is sent."""

    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Annotated[Any, Only("an answer does not repeat the messages", False)] = None


class ChatBody(Spoken):
    """``POST /v1/chat/completions``: messages in, an answer out."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None


class TextBody(Writing):
    """``POST /v1/completions``: text or ids to continue; with ``suffix`` the middle is written."""

    prompt: Prompt
    suffix: str = ""
    logprobs: Alternatives | None = None
    echo: bool = False
    tools: Annotated[Any, Only("tools belong to /v1/chat/completions", [])] = None
    tool_choice: Annotated[Any, Only("tools belong to /v1/chat/completions", "none", "auto")] = None
    parallel_tool_calls: bool | None = None


class InfillBody(Decoding):
    """``POST /v1/infill``: ``text`` with ``[[8]]`` for a hole of 8 tokens, ``[[*]]`` for one whose
    length is measured, by the rule ``length``."""

    text: Holed
    prompt: str | None = None
    messages: Messages | None = None


class ScoreBody(Body):
    """``POST /v1/score``: how likely continuations are."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    continuation: Continuation
    estimator: str | None = None
    samples: Annotated[int, Field(ge=1, le=4096)] | None = None
    greedy: bool | None = None
    early_stop: bool | None = None

    TAKES = ("cfg_scale", "seed")


class StepBody(Body):
    """``POST /v1/step``: ``text`` with ``[[8]]`` for 8 undecided positions, or ids with -1."""

    model: str | None = None
    text: Holed | None = None
    tokens: list[int] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    top: Annotated[int, Field(ge=1, le=100)] = 5

    TAKES = ("cfg_scale",)


class TokenizeBody(Body):
    """``POST /tokenize``: a text as it is, or messages in the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: Annotated[Any, Only(ENCODED, True)] = None
    add_generation_prompt: Annotated[Any, Only(COMPLETE, True)] = None
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: list[Number]


class DeviceBody(Body):
    """``POST /v1/verify/open``, without the prompt and the vocabulary."""

    repetition: Number = 0
    max_new_tokens: Count | None = None

    TAKES = ("seed", "temperature", "top_p", "top_k")
