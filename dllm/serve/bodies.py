"""The bodies of requests: which fields are honoured, which change nothing, which are refused.

The fields of `REFUSED` are accepted at the values that change nothing, and refused elsewhere with
the reason.  A parameter that no class here has is refused as well: none is ignored silently.  What
clients echo of other servers (messages, calls, tools) may hold more than is read here.
"""

import json
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from ..core.config import FILTERS, Count, GenerationConfig, Number
from ..core.declared import ANSWER, HOLES
from .body import Body, Echoed, Must, Refusals
from .problems import Problem, invalid
from .wire import LONGEST_STOP, MOST_HOLES, SPEC, is_spec

LONGEST_FORM = 65_536  # characters of a schema or an expression
MOST_CHOICES = 8
MOST_CHOICES_OF_TEXT = 1024
MOST_TEXTS = 64
SYSTEM = {"developer": "system"}  # what OpenAI calls it now -> what chat templates know
MOST_TOOLS = 128
MOST_NODES = 512  # of a draft
MOST_IDS = 64  # whose log-probabilities are wanted


class Part(BaseModel):
    """A text in the content of a message; what else stands there says nothing to a model."""

    type: Literal["text", "input_text", "output_text", "reasoning_text", "summary_text"]
    text: str


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict) and len(json.dumps(value)) <= LONGEST_FORM


def _is_response_format(value: Any) -> bool:
    match value.get("type"):
        case "structural_tag":
            return _is_schema(value)
        case "json_object":  # llama.cpp's clients send a schema
            given = value.get("schema"), value.get("json_schema")
            return all(one is None or _is_schema(one) for one in given)
        case "json_schema":
            given = value.get("json_schema")
            return isinstance(given, dict) and _is_schema(given.get("schema"))
    return {k: v for k, v in value.items() if v is not None} == {"type": "text"}


def _is_function(value: Any) -> bool:
    function = value.get("function", value) if isinstance(value, dict) else None
    return isinstance(function, dict) and value.get("type") == "function" and (
        isinstance(function.get("name"), str)
    )  # fmt: skip


def _is_tool_choice(value: Any) -> bool:
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools", value)  # of chats, of responses
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        return isinstance(tools, list) and 0 < len(tools) <= MOST_TOOLS and (
            allowed.get("mode") in ("auto", "required") and all(map(_is_function, tools))
        )  # fmt: skip
    return _is_function(value) or value in ("none", "auto", "required")


Seconds = Annotated[float, Field(gt=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Alternatives = Annotated[int, Field(ge=0, le=20)]
Ids = Annotated[list[int], Field(fail_fast=True)]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Sampler = Annotated[str, Must(SPEC.kind, is_spec)]
Several = Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)
Given = Annotated[Ids, Field(min_length=1)]  # ids of a prompt
Prompt = Annotated[
    str | Given | Annotated[list[str], Several] | Annotated[list[Given], Several],
    Must(f"a string, token ids, or a list of at most {MOST_TEXTS} of either"),
]
Holed = Annotated[
    str,
    Must(f"a string with at most {MOST_HOLES} holes such as [[8]]",
         lambda value: value.count("[[") <= MOST_HOLES),
]  # fmt: skip
Continuation = Annotated[
    str | Annotated[list[str], Several], Must(f"a string or 1 to {MOST_TEXTS} strings")
]
Content = Annotated[
    str | Annotated[list[Part], Field(fail_fast=True)],
    Must("a string or text parts: this model reads text only"),
]
Drafts = Annotated[bool | Literal["text"], Must("true, false or 'text'")]
Choice = Annotated[
    list[Text],
    Field(min_length=1, max_length=MOST_CHOICES_OF_TEXT, fail_fast=True),
    Must(f"a list of 1 to {MOST_CHOICES_OF_TEXT} strings"),
]
Values = Annotated[
    dict[str, Any], Must(f"an object of at most {LONGEST_FORM} characters", _is_schema)
]
ResponseFormat = Annotated[
    dict[str, Any],
    Must('{"type": "text"}, {"type": "json_object"}, {"type": "structural_tag", "structures": ..., '
         '"triggers": ...} or {"type": "json_schema", "json_schema": '
         f'{{"name": ..., "schema": ...}}}} of at most {LONGEST_FORM} characters',
         _is_response_format),
]  # fmt: skip
ToolChoice = Annotated[
    str | dict[str, Any],
    Must('"none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
         '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
         _is_tool_choice),
]  # fmt: skip
Role = Literal["system", "developer", "user", "assistant", "tool"]


class CalledFunction(Echoed):
    """Which tool was called; ``arguments`` is JSON."""

    name: str
    arguments: str


class ToolCall(Echoed):
    """A call that an answer made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Echoed):
    """What somebody says.  ``tool_calls`` and ``reasoning_content`` are of answers,
    ``tool_call_id`` of what a tool returned."""

    role: Role
    content: Content | None = None
    name: str = ""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str = ""
    reasoning_content: str = ""

    def shown(self, where: str) -> dict[str, Any]:
        """The message as chat templates know it, which want arguments as an object."""
        content = self.content
        if content is None:
            if self.role != "assistant":
                raise invalid(f"{where}.content", f"{where}.content must be a string or text parts")
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
                    "name": call.function.name, "arguments": json_or_text(call.function.arguments)
                }} for call in self.tool_calls
            ]  # fmt: skip
        return result


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates know them."""
    return [message.shown(f"messages[{i}]") for i, message in enumerate(messages)]


Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]


class Asking(Body):
    """A prompt or messages, to the model that is served."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None

    @property
    def question(self) -> Any:
        """The prompt or the messages, whichever is there; None for neither."""
        if self.prompt is not None and self.messages is not None:
            raise Problem(400, "prompt and messages are given: keep one of them", "prompt")
        return self.prompt or None if self.messages is None else conversation(self.messages)


class Function(Echoed):
    """A tool; ``parameters`` is a JSON schema."""

    name: Annotated[
        str,
        Field(pattern="^[a-zA-Z0-9_-]{1,64}$"),
        Must("a name of 1 to 64 letters, digits, _ and -"),
    ]
    description: str = ""
    parameters: Values | None = None
    strict: bool | None = None


FunctionOnly = Annotated[
    Literal["function"], Must('"function", a tool that the client runs (this server runs none)')
]


class Tool(Echoed):
    """What an answer may call."""

    type: FunctionOnly = "function"
    function: Function


class StreamOptions(Body):
    """What a stream brings beside the text.  Nothing is padded."""

    include_obfuscation: Literal[False] = False
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
ENCODED = "a prompt is encoded as the model expects"
SPECIAL = "special tokens are not text"
CHATS = "tools belong to /v1/chat/completions"

# What clients send and no text can heed: the reason, and the values that change nothing.
REFUSED: Refusals = {
    "length_penalty": ("there are no beams", (1,)),
    "use_beam_search": ("there are no beams", (False,)),
    "bad_words": ("words cannot be forbidden", ([],)),
    "allowed_token_ids": ("structured_outputs says which texts are allowed", ([],)),
    "include_reasoning": ("thoughts are part of the answer", (True,)),
    "kv_transfer_params": ("keys and values stay on this server", ()),
    "truncation_side": ("of a prompt that is cut the end stays", ("left",)),
    "stop_token_ids": ("stop ids are the model's own: use stop", ([],)),
    "typical_p": (f"use one of {', '.join(FILTERS)}", (1,)),
    "include_stop_str_in_output": ("a stop string is never part of the text", (False,)),
    "skip_special_tokens": (SPECIAL, (True,)),
    "spaces_between_special_tokens": (SPECIAL, (True,)),
    "add_special_tokens": (ENCODED, (True,)),
    "detokenize": ("answers are text: return_token_ids adds the ids", (True,)),
    "guided_json": (GUIDED, ()),
    "guided_regex": (GUIDED, ()),
    "guided_choice": (GUIDED, ()),
    "guided_grammar": (GUIDED, ()),
    "functions": (TOOLS, ([],)),
    "function_call": (TOOLS, ("none", "auto")),
    "web_search_options": (TOOLS, ()),
    "modalities": (OTHER, (["text"],)),
    "audio": (OTHER, ()),
    "moderation": (OTHER, ()),
    "prediction": ("begin with a draft, initial_text, or fix parts with constraints", ()),
    "priority": ("requests are served in the order they come", (0,)),
}


class StructuredOutputs(Body):
    """The form of an answer, as vLLM calls it: one of these."""

    regex: Annotated[str, Field(min_length=1, max_length=LONGEST_FORM)] | None = None
    choice: Choice | None = None
    schema_: Values | None = Field(default=None, alias="json")
    grammar: Annotated[str, Field(min_length=1, max_length=LONGEST_FORM)] | None = None
    structural_tag: Values | None = None


class Writing(Decoding):
    """Answers of a length that is asked for, and what OpenAI's and vLLM's clients send beside."""

    TAKES = GenerationConfig.fields(ANSWER)
    REFUSED = REFUSED

    ignore_eos: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    prompt_logprobs: Alternatives | None = None
    logprob_token_ids: Annotated[Ids, Field(min_length=1, max_length=MOST_IDS)] | None = None
    return_tokens_as_token_ids: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None
    store: bool | None = None  # answers say that they are not kept
    metadata: Values | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    request_id: str | None = None
    best_of: float | None = None


class Spoken(Writing):
    """What a chat has, however it is sent."""

    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Values | None = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    REFUSED = REFUSED | {"echo": ("an answer does not repeat the messages", (False,))}


class ChatBody(Spoken):
    """``POST /v1/chat/completions``: messages in, an answer out."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None


class TextBody(Writing):
    """``POST /v1/completions``: text or ids to continue; with ``suffix`` the middle is written."""

    prompt: Prompt
    suffix: str = ""
    logprobs: Alternatives | None = None
    echo: bool = False
    parallel_tool_calls: bool | None = None
    REFUSED = REFUSED | {"tools": (CHATS, ([],)), "tool_choice": (CHATS, ("none", "auto"))}


class InfillBody(Asking, Decoding):
    """``POST /v1/infill``: ``text`` with ``[[8]]`` for a hole of 8 tokens, ``[[*]]`` for one whose
    length is measured, by the rule ``length``."""

    text: Holed


class ScoreBody(Asking):
    """``POST /v1/score``: how likely continuations are."""

    continuation: Continuation
    estimator: str | None = None
    samples: Annotated[int, Field(ge=1, le=4096)] | None = None
    greedy: bool | None = None
    early_stop: bool | None = None

    TAKES = ("cfg_scale", "seed")

    @property
    def scoring(self) -> dict[str, Any]:
        """How to score."""
        names = self.given.keys() & {"estimator", "samples", "greedy", "early_stop"}
        return {**{name: getattr(self, name) for name in names}, **self.how}


class StepBody(Asking):
    """``POST /v1/step``: ``text`` with ``[[8]]`` for 8 undecided positions, or ids with -1."""

    text: Holed | None = None
    tokens: Ids | None = None
    top: Annotated[int, Field(ge=1, le=100)] = 5

    TAKES = ("cfg_scale",)


class TokenizeBody(Asking):
    """``POST /tokenize``: a text as it is, or messages in the model's template."""

    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: Values | None = None


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[Number], Field(fail_fast=True)]


class DeviceBody(Body):
    """``POST /v1/verify/open``."""

    vocabulary: str
    prompt: Given
    repetition: Number = 0
    max_new_tokens: Count | None = None

    TAKES = ("seed", "temperature", "top_p", "top_k")


class EndBody(Body):
    """``POST /v1/verify/close``."""

    sid: str


class DraftBody(EndBody):
    """``POST /v1/verify/step``: ``tokens`` behind ``base_len`` others, ``parents`` for a tree."""

    base_len: Number
    tokens: Annotated[Ids, Field(max_length=MOST_NODES)]
    parents: Ids | None = None
