"""From a body to what the engine is asked for."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.config import FILTERS, FORMATS
from ..core.text import hole_forms
from . import bodies
from .bodies import MOST_TEXTS
from .problems import invalid, shortened, unsupported

MOST_CALLS = 16
NO_OPTIONS = bodies.StreamOptions()
PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
NEUTRAL = ("logit_bias", "stop_strings", "constraints", "remask", "top_k", "min_new_tokens")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """``kind`` is "chat", "text" or "infill"; every one of ``prompts`` is answered ``n`` times.
    ``arguments`` are fields of `dllm.GenerationConfig`.

    ``only_prompt``: the answer is the prompt, whose log-probabilities are what is wanted.
    ``text`` is what `dllm.infill` fills, ``suffix`` what follows a hole of the whole length.
    ``logprobs``: None, or how many alternatives are wanted beside each token.
    ``usage_with_each``: whether every chunk counts the tokens so far, as vLLM's do.  ``drafts``:
    False, True, or "text" for rendered lines.
    ``template``: variables of the chat template.  ``tools`` as OpenAI describes them, of which
    ``tool_choice`` ("auto", "required", or a name) says whether one is called, ``most_calls`` how
    many, ``several`` that a required call may be a list of them.  ``penalties`` by name, those that
    change something.  ``endless``: a stop string may end an answer, and no stop id.
    ``response``: of ``/v1/responses``, what its answer repeats; None for all others.
    ``truncate``: most tokens of a prompt, whose last ones stay (-1: what the answer leaves of the
    context; 0: all of it), or "auto": whole turns of a chat go, the oldest first.
    ``prompt_logprobs``: how many alternatives are wanted beside each token of the prompt; None: no
    likelihoods of it.  ``logprob_ids``: tokens whose log-probabilities are wanted beside those
    written; ``as_ids``: that these are named by their ids.  ``ready``: that a conversation ends
    where the answer begins, ``continued``: in the middle of it.  ``user``, ``salt``: who asks, as
    far as the body says, and with whom kept prefixes are shared.
    """

    kind: str
    prompts: Sequence[Any]
    chat: bool | None = None
    text: str | None = None
    suffix: str | None = None
    model: str | None = None
    cache: str | None = None
    sampler: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    usage_with_each: bool = False
    drafts: bool | str = False
    logprobs: int | None = None
    token_ids: bool = False
    trace: bool = False
    deadline: float | None = None
    echo: bool = False
    only_prompt: bool = False
    template: Mapping[str, Any] = field(default_factory=dict)
    penalties: Mapping[str, float] = field(default_factory=dict)
    response: Mapping[str, Any] | None = None
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: str = "none"
    most_calls: int = 1
    several: bool = False
    endless: bool = False
    truncate: int | str = 0
    prompt_logprobs: int | None = None
    logprob_ids: Sequence[int] = ()
    as_ids: bool = False
    ready: bool = True
    continued: bool = False
    user: str = ""
    salt: str = ""

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return bool(self.tools) and self.tool_choice != "auto"

    @property
    def either(self) -> bool:
        """Whether the answer has to be a call or of a form."""
        return bool(self.tools) and self.tool_choice == "auto" and "json_schema" in self.arguments

    @property
    def form(self) -> str | None:
        """What names the form of the answer, which may need an automaton; None: it has none."""
        given = {name: self.arguments[name] for name in FORMATS if name in self.arguments}
        if self.text is not None and any(forms := hole_forms(self.text)):
            given["holes"] = forms
        if self.forced or self.either:
            given["tools"] = [*self.tools, self.tool_choice, self.most_calls, self.several]
        return json.dumps(given, default=str) if given else None

    @property
    def texts(self) -> list[Any]:
        """What is read by the tokenizer."""
        given = [self.text or "", self.suffix, self.arguments.get("initial_text")]
        return [*self.prompts, *given, [*self.arguments.get("constraints", {}).values()]]

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


def read_chat(data: Any) -> GenerateRequest:
    """``POST /v1/chat/completions``."""
    body = bodies.ChatBody.read(data)
    length = body.max_completion_tokens
    if length is not None and body.value("max_tokens") not in (None, length):
        raise invalid("max_completion_tokens",
                      "max_tokens and max_completion_tokens differ: give one of them")  # fmt: skip
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    return chat_request(
        body, bodies.conversation(body.messages), length or body.value("max_tokens"), tools,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )  # fmt: skip


def chat_request(
    body: bodies.Spoken, messages: list[dict[str, Any]], length: int | None,
    tools: list[dict[str, Any]], most_calls: int | None = None, **more: Any,
) -> GenerateRequest:  # fmt: skip
    """What is asked for by ``messages``, as chat templates know them."""
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", "two tools have the same name")
    wanted, allowed = _chosen(body.tool_choice, names)
    known = names if allowed else [*names, "none", "auto", *["required"] * bool(names)]
    for name in allowed or [wanted]:
        if name not in known:
            has = f"is none of the tools: {', '.join(names)}" if names else "needs tools"
            raise invalid("tool_choice", f"tool_choice {shortened(name)} {has}")
    tools = [tool for tool in tools if tool["function"]["name"] in (allowed or names)]
    if wanted not in ("none", "auto") and body.structured_outputs is not None:
        text = f"tool_choice {shortened(wanted)} makes the answer a call: it has no other form"
        raise invalid("tool_choice", text)
    thinking = {} if body.enable_thinking is None else {"enable_thinking": body.enable_thinking}
    calls = MOST_CALLS if body.parallel_tool_calls else 1
    return _request(
        "chat", body, [messages], length, tools=[] if wanted == "none" else tools,
        tool_choice=wanted, most_calls=min(calls, most_calls or calls),
        several=wanted == "required" and body.given.get("parallel_tool_calls", False),
        ready=body.add_generation_prompt, continued=body.continue_final_message,
        template=thinking | (body.chat_template_kwargs or {}), **more,
    )  # fmt: skip


def _chosen(choice: Any, names: list[str]) -> tuple[str, list[str]]:
    """Whether a tool is called, or which one; and the tools that may be, none: all of them."""
    if not isinstance(choice, dict):
        return choice or ("auto" if names else "none"), []
    if choice["type"] == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        return allowed["mode"], [tool.get("function", tool)["name"] for tool in allowed["tools"]]
    name: str = choice.get("function", choice)["name"]
    return ("required", [name]) if name in ("none", "auto", "required") else (name, [])


def read_text(data: Any) -> GenerateRequest:
    """``POST /v1/completions``."""
    only = isinstance(data, dict) and data.get("max_tokens") == 0 and data.get("echo") is True
    body = bodies.TextBody.read(data | {"max_tokens": 1} if only else data)
    several = isinstance(body.prompt, list) and not isinstance(body.prompt[0], int)
    for name in ("min_tokens", "ignore_eos", "constraints", "length", "initial_text"):
        if body.suffix and body.value(name):
            raise unsupported(name, f"{name} does not go with suffix: the hole has max_tokens "
                              "positions and all of them are written")  # fmt: skip
    if only and body.stream:
        raise unsupported("stream", "max_tokens=0 writes nothing: drop stream")
    if body.suffix and (body.echo or body.prompt_logprobs is not None):
        raise unsupported("suffix", "suffix does not go with echo, nor with prompt_logprobs: the "
                          "prompt is the beginning of the text")  # fmt: skip
    echoed = body.echo and body.prompt_logprobs is None
    wanted = {"prompt_logprobs": body.logprobs} if echoed else {}
    return _request(
        "text", body, body.prompt if several else [body.prompt], body.value("max_tokens"),
        chat=False, suffix=body.suffix or None, logprobs=body.logprobs, echo=body.echo,
        only_prompt=only, **wanted,
    )  # fmt: skip


def read_infill(data: Any) -> GenerateRequest:
    """``POST /v1/infill``."""
    body = bodies.InfillBody.read(data)
    return _request("infill", body, [body.question], None, text=body.text)


def _request(
    kind: str, body: bodies.Decoding, prompts: Sequence[Any], length: int | None, **more: Any
) -> GenerateRequest:
    if body.stream_options and not body.stream:
        raise invalid("stream_options", "stream_options needs stream=true")
    options = body.stream_options or NO_OPTIONS
    if len(prompts) * body.n > MOST_TEXTS:
        raise invalid("n", f"a request has at most {MOST_TEXTS} answers")
    penalties = {
        name: value for name, neutral in PENALTIES.items()
        if (value := getattr(body, name, neutral)) != neutral
    }  # fmt: skip
    if isinstance(body, bodies.Writing):
        if body.best_of not in (None, 1, body.n):
            text = f"best_of={shortened(body.best_of)} is not supported: use n"
            raise unsupported("best_of", text)
        ids = body.logprob_token_ids
        if ids and more.get("logprobs") is None:
            raise invalid("logprob_token_ids", "logprob_token_ids needs logprobs")
        more = {
            "truncate": body.truncate_prompt_tokens or 0, "prompt_logprobs": body.prompt_logprobs,
            "logprob_ids": ids or (), "as_ids": body.return_tokens_as_token_ids,
            "user": body.user or "", "salt": body.cache_salt or "",
            "endless": body.ignore_eos and bool(body.value("stop")), **more,
        }  # fmt: skip
    asked = GenerateRequest(
        kind=kind, prompts=prompts, model=body.model, cache=body.cache, sampler=body.sampler,
        arguments=_arguments(body, length), penalties=penalties, n=body.n, stream=body.stream,
        include_usage=options.include_usage,
        usage_with_each=options.include_usage and options.continuous_usage_stats,
        drafts=options.include_drafts, token_ids=body.return_token_ids,
        trace=body.trace, deadline=body.deadline, **more,
    )  # fmt: skip
    if isinstance(body, bodies.Writing) and body.ignore_eos and (asked.form or length is None):
        raise invalid("ignore_eos", "ignore_eos needs max_tokens and an answer without a structure")
    return asked


def _arguments(body: bodies.Decoding, length: int | None) -> dict[str, Any]:
    """Fields of `dllm.GenerationConfig`.

    Without a seed, an answer that is sampled draws one, which the response names, so that it can
    be repeated; a greedy one has the seed 0.  Greedy answers have nothing to filter: clients that
    send filters with every request get what they would get without.
    """
    result = {k: v for k, v in body.how.items() if v or k not in NEUTRAL}
    if result.get("temperature"):
        result.setdefault("seed", secrets.randbelow(2**31))
    else:
        for name in FILTERS:
            result.pop(name, None)
    if length is not None:
        result["max_new_tokens"] = length
    if isinstance(body, bodies.Writing):
        if body.ignore_eos and "stop_strings" not in result:
            result["min_new_tokens"] = length
        result |= _form(body)
    return result


def _form(body: bodies.Writing) -> dict[str, Any]:
    """The argument that gives the answer a form."""
    wanted, given = body.response_format or {"type": "text"}, body.structured_outputs
    forms: dict[str, Any] = {}
    if wanted["type"] == "structural_tag":
        forms["structural_tag"] = {key: wanted[key] for key in wanted if key != "type"}
    elif wanted["type"] != "text":
        schema = (wanted.get("json_schema") or wanted).get("schema")
        forms["json_schema"] = {"type": "object"} if schema is None else schema
    if given is not None:
        named = {"regex": given.regex, "choice": given.choice, "json_schema": given.schema_,
                 "grammar": given.grammar, "structural_tag": given.structural_tag}  # fmt: skip
        if forms or sum(value is not None for value in named.values()) > 1:
            raise invalid("structured_outputs", "an answer has one structure: keep one field of "
                          "structured_outputs, or response_format")  # fmt: skip
        forms = {name: value for name, value in named.items() if value is not None}
    return forms
