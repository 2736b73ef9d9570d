"""From the body of a request to what the engine is asked for."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .fields import OPTIONS, checked, require, shortened, unknown_field
from .problems import Problem

SYSTEM = {"developer": "system"}  # what OpenAI calls it now -> what chat templates know
ROLES = ("system", "developer", "user", "assistant")
SAME_NAME = ("temperature", "top_p", "steps", "block_length", "cfg_scale", "eos_policy")
MOST_PROMPTS = 64


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request.  ``kind`` is "chat", "text" or "infill"; every one of ``prompts`` is answered
    ``n`` times.  ``arguments`` are fields of `dllm.GenerationConfig`.

    ``text`` is what `dllm.infill` fills, ``suffix`` what follows a hole of the whole length.
    ``logprobs``: None, or how many alternatives are wanted beside each token.
    ``usage_with_each``: whether every chunk counts the tokens so far, as vLLM's do.  ``drafts``:
    False, True, or "text" for rendered lines; ``diffusing``: every chunk is the whole present text.
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
    diffusing: bool = False
    logprobs: int | None = None
    token_ids: bool = False
    trace: bool = False
    deadline: float | None = None

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


def read_chat(body: Any) -> Ask:
    """``POST /v1/chat/completions``."""
    given = checked("chat", body)
    _require(given, "messages")
    length = given.pop("max_completion_tokens", None)
    if length is not None:
        if given.get("max_tokens", length) != length:
            raise Problem(
                400, "max_tokens and max_completion_tokens differ: give one of them",
                "max_completion_tokens", "invalid_value",
            )  # fmt: skip
        given["max_tokens"] = length
    wanted = given.get("top_logprobs")
    if wanted is not None and not given.get("logprobs"):
        raise Problem(400, "top_logprobs needs logprobs=true", "top_logprobs", "invalid_value")
    logprobs = (wanted or 0) if given.get("logprobs") else None
    return _ask("chat", given, [messages(given["messages"])], logprobs=logprobs)


def read_text(body: Any) -> Ask:
    """``POST /v1/completions``."""
    given = checked("text", body)
    _require(given, "prompt")
    prompt = given["prompt"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = prompt if several else [prompt]
    if len(prompts) > MOST_PROMPTS:
        raise Problem(400, f"at most {MOST_PROMPTS} prompts go into a request", "prompt")
    suffix = given.get("suffix") or None
    if suffix is not None:
        for name in ("stop", "min_tokens", "ignore_eos", "constraints"):
            if given.get(name):
                raise Problem(
                    400, f"{name} does not go with suffix: the hole has max_tokens positions and "
                    "all of them are written", name, "unsupported_value",
                )  # fmt: skip
    return _ask("text", given, prompts, chat=False, suffix=suffix, logprobs=given.get("logprobs"))


def read_infill(body: Any) -> Ask:
    """``POST /v1/infill``: ``text`` with ``[[8]]`` for a hole of 8 tokens."""
    given = checked("infill", body)
    _require(given, "text")
    return _ask("infill", given, [_question(given)], text=given["text"])


def read_score(body: Any) -> tuple[Any, list[str], dict[str, Any]]:
    """``POST /v1/score``: the prompt, the continuations, and how to score."""
    given = checked("score", body)
    _require(given, "continuation")
    texts = given.pop("continuation")
    prompt = _question(given)
    how = {k: v for k, v in given.items() if k not in ("model", "prompt", "messages")}
    return "" if prompt is None else prompt, [texts] if isinstance(texts, str) else texts, how


def _question(given: Mapping[str, Any]) -> Any:
    """The prompt or the messages, whichever is there; None for neither."""
    if "prompt" in given and "messages" in given:
        raise Problem(400, "prompt and messages are given: keep one of them", "prompt")
    return messages(given["messages"]) if "messages" in given else given.get("prompt") or None


def _require(given: Mapping[str, Any], name: str) -> None:
    if name not in given:
        raise Problem(400, f"{name} is missing", name, "missing_field")


def _ask(kind: str, given: Mapping[str, Any], prompts: Sequence[Any], **more: Any) -> Ask:
    options = given.get("stream_options") or {}
    for name, value in options.items():
        if name not in OPTIONS:
            raise unknown_field(f"stream_options.{name}", [f"stream_options.{k}" for k in OPTIONS])
        require(f"stream_options.{name}", value, OPTIONS[name])
    stream, diffusing = given.get("stream", False), given.get("diffusing", False)
    drafts = options.get("include_drafts", False)
    for name, wanted in (("stream_options", options), ("diffusing", diffusing)):
        if wanted and not stream:
            raise Problem(400, f"{name} needs stream=true", name, "invalid_value")
    if drafts and diffusing:
        raise Problem(
            400, "diffusing replaces the text with every chunk, include_drafts adds frames beside "
            "it: ask for one of them", "diffusing", "invalid_value",
        )  # fmt: skip
    ask = Ask(
        kind=kind, prompts=prompts, model=given.get("model"), cache=given.get("cache"),
        sampler=given.get("sampler"), arguments=_arguments(given), n=given.get("n", 1),
        stream=stream, include_usage=options.get("include_usage", False),
        usage_with_each=options.get("include_usage", False)
        and options.get("continuous_usage_stats", False),
        drafts=drafts, diffusing=diffusing, token_ids=given.get("return_token_ids", False),
        trace=given.get("trace", False), deadline=given.get("deadline"), **more,
    )  # fmt: skip
    if ask.choices > MOST_PROMPTS:
        raise Problem(400, f"a request has at most {MOST_PROMPTS} answers", "n", "invalid_value")
    return ask


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `dllm.GenerationConfig`.

    Without a seed, an answer that is sampled draws one, which the response names, so that it can
    be repeated; a greedy one has the seed 0.  Greedy answers have nothing to filter: clients that
    send ``top_p`` or ``top_k`` with every request get what they would get without.
    """
    result = {name: given[name] for name in SAME_NAME if name in given}
    if not given.get("temperature"):
        result.pop("top_p", None)
    if "max_tokens" in given:
        result["max_new_tokens"] = given["max_tokens"]
    if given.get("min_tokens"):
        result["min_new_tokens"] = given["min_tokens"]
    if given.get("ignore_eos"):
        if "max_tokens" not in given:
            raise Problem(400, "ignore_eos needs max_tokens", "ignore_eos", "invalid_value")
        result["min_new_tokens"] = given["max_tokens"]
    if given.get("top_k", 0) > 0 and given.get("temperature"):  # vLLM's clients say -1 for none
        result["top_k"] = given["top_k"]
    stop = given.get("stop")
    if stop:
        result["stop_strings"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if given.get("constraints"):
        result["constraints"] = {int(k): v for k, v in given["constraints"].items()}
    if "seed" in given:
        result["seed"] = given["seed"]
    elif given.get("temperature"):
        result["seed"] = secrets.randbelow(2**31)
    return result


def messages(items: Sequence[Any]) -> list[dict[str, str]]:
    """Chat messages as templates know them; `Problem` for what a text model cannot read."""
    result = []
    for i, message in enumerate(items):
        where = f"messages[{i}]"
        if not isinstance(message, dict):
            raise Problem(400, f"{where} must be an object with role and content", where)
        role = message.get("role")
        if role not in ROLES:
            raise Problem(
                400, f"{where}.role must be one of {', '.join(ROLES)}, not {shortened(role)}",
                f"{where}.role", "invalid_value",
            )  # fmt: skip
        for name, value in message.items():
            if name not in ("role", "content", "name") and value not in (None, [], ""):
                raise Problem(
                    400, f"{where}.{name[:40]} is not supported: a message is text",
                    f"{where}.{name[:40]}", "unsupported_value",
                )  # fmt: skip
        text = _content(message.get("content"), f"{where}.content")
        result.append({"role": str(SYSTEM.get(role, role)), "content": text})
    return result


def _content(content: Any, where: str) -> str:
    """The text of a message: a string, or parts that are text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Problem(400, f"{where} must be a string or text parts", where, "invalid_value")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Problem(
                400, f"{where} has a part of type {shortened(kind)}: this model reads text only",
                where, "unsupported_value",
            )  # fmt: skip
        texts.append(part["text"])
    return "".join(texts)
