"""Answers on the wire: whole bodies, and the chunks of a stream."""

from __future__ import annotations

import itertools
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..runtime.spelling import LONGEST_CHARACTER, Spelling
from .http import event
from .problems import Problem
from .requests import GenerateRequest
from .tools import Said

if TYPE_CHECKING:
    from ..likelihood.tokens import TokenScores
    from ..runtime.result import Result

PREFIXES = {"chat": "chatcmpl", "text": "cmpl", "infill": "infill"}
OBJECTS = {"chat": "chat.completion", "text": "text_completion", "infill": "infill"}
CHUNKS = {"chat": "chat.completion.chunk", "text": "text_completion", "infill": "infill.chunk"}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
BEFORE = 2 * LONGEST_CHARACTER  # tokens before a hole, among them a whole character

Name = Callable[[int, str | None], str]  # what a token is called that has a text, or stands alone


@dataclass(frozen=True)
class Choice:
    """One finished answer.  ``text`` is what the client gets, of ``result``; ``said`` the calls and
    thoughts in the text of a chat; ``given``: how likely the tokens of the prompt are."""

    result: Result
    text: str
    said: Said | None = None
    given: TokenScores | None = None


@dataclass(frozen=True)
class Reply:
    """What all parts of an answer to ``ask`` have in common."""

    ask: GenerateRequest
    model: str
    fingerprint: str
    spelling: Spelling
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.id:
            object.__setattr__(self, "id", f"{PREFIXES[self.ask.kind]}-{secrets.token_hex(12)}")

    def body(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The whole answer."""
        ask = self.ask
        listed = []
        for index, choice in enumerate(choices):
            entry: dict[str, Any] = {"index": index}
            if ask.kind == "chat":
                entry["message"] = {"role": "assistant", "refusal": None} | message(choice)
            else:
                entry["text"] = choice.text
            if ask.kind == "infill":
                entry["holes"] = choice.result.holes
            listed.append(entry | self._ending(choice))
        results = [choice.result for choice in choices]
        extra: dict[str, Any] = {}
        if ask.kind == "chat" and ask.prompt_logprobs is not None:  # of the one prompt
            *_, extra["prompt_logprobs"] = [one.pop("prompt_logprobs") for one in listed]
        if ask.token_ids and len(ask.prompts) == 1:
            extra["prompt_token_ids"] = listed[0]["prompt_token_ids"]
        return self._head(OBJECTS[ask.kind]) | {
            "choices": listed, "usage": usage(ask, results), "dllm": figures(results)
        } | extra  # fmt: skip

    def name(self, token: int, text: str | None) -> str:
        """What a token is called beside its log-probability; None: it stands alone."""
        if self.ask.as_ids:
            return f"token_id:{token}"
        return self.spelling.piece(token) if text is None else text

    end: ClassVar[bytes] = DONE
    encode = staticmethod(event)

    def failure(self, problem: Problem) -> bytes:
        """The event that ends a stream which failed."""
        return event(problem.body())

    def opening(self) -> list[dict[str, Any]]:
        """What comes before everything else."""
        return []

    def chunk(self, index: int, delta: Mapping[str, Any], first: bool) -> list[dict[str, Any]]:
        """More of a choice: ``delta`` of its message, or its ``text``; the first names the role."""
        entry: dict[str, Any] = {"index": index, **delta}
        if self.ask.kind == "chat":
            role = {"role": "assistant"} if first else {}
            entry = {"index": index, "delta": role | dict(delta)}
        return [self._chunk([entry | {"logprobs": None, "finish_reason": None}])]

    def last(self, index: int, choice: Choice) -> list[dict[str, Any]]:
        """The end of a choice.  Its log-probabilities come here, all together: a position's is
        that of its commit, and commits do not come in the order of the text."""
        empty: dict[str, Any] = {"delta": {}} if self.ask.kind == "chat" else {"text": ""}
        entry = {"index": index, **empty}
        if self.ask.kind == "infill":
            entry["holes"] = choice.result.holes
        return [self._chunk([entry | self._ending(choice)])]

    def totals(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """The usage chunk, after all choices."""
        results = [choice.result for choice in choices]
        return [self._chunk([]) | {"usage": usage(self.ask, results), "dllm": figures(results)}]

    def frame(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """A chunk without choices, which no client takes for text."""
        return self._chunk([]) | {"dllm": content}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": self.fingerprint,
        }  # fmt: skip

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head(CHUNKS[self.ask.kind]) | {"choices": choices}

    def _ending(self, choice: Choice) -> dict[str, Any]:
        """What stands beside the text of a finished choice."""
        ask, result = self.ask, choice.result
        entry: dict[str, Any] = {"finish_reason": result.finish_reason, "logprobs": None}
        if choice.said is not None and choice.said.calls:
            named = ask.tool_choice not in ("auto", "required")
            entry["finish_reason"] = "stop" if named else "tool_calls"
        if ask.logprobs is not None:
            found = entries(choice, ask, self.spelling)
            if ask.kind == "chat":
                entry["logprobs"] = {"content": chat_logprobs(found, self.name), "refusal": None}
            else:
                entry["logprobs"] = text_logprobs(found, self.name)
        if choice.given is not None:
            found = given_entries(choice.given, ask, self.spelling)
            entry["prompt_logprobs"] = prompt_logprobs(found, self.name)
        if ask.token_ids:
            hole = ask.suffix is not None
            said = [i for i, step in enumerate(result.order) if step >= 0 or not hole]
            entry["token_ids"] = [result.tokens[i] for i in said]
            before = result.prompt_length + (said[0] if hole else 0)
            entry["prompt_token_ids"] = result.sequences[:before].tolist()
        if ask.trace and result.trace is not None:
            entry["trace"] = json.loads(result.trace.to_json())
        return entry


def message(choice: Choice) -> dict[str, Any]:
    """What a chat's answer says."""
    said = choice.said
    if said is None:
        return {"content": choice.text}
    result: dict[str, Any] = {"content": said.content or (None if said.calls else "")}
    if said.reasoning:
        result["reasoning_content"] = said.reasoning
    if said.calls:
        result["tool_calls"] = [call.body() for call in said.calls]
    return result


def usage(ask: GenerateRequest, results: Sequence[Result]) -> dict[str, Any]:
    """Tokens as OpenAI counts them: a prompt once, whatever the number of its answers."""
    prompt = sum(given_tokens(result) for result in results[:: ask.n])
    written = sum(result.decided for result in results)
    cached = sum(result.cached_tokens for result in results[:: ask.n])
    return tokens_used(prompt, written) | {"prompt_tokens_details": {"cached_tokens": cached}}


def tokens_used(prompt: int, written: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def given_tokens(result: Result) -> int:
    """Tokens of the prompt, and of what was fixed in the answer, or stood behind its hole."""
    if len(result.holes) == 1:
        return len(result.sequences) - result.canvas
    return result.prompt_length + len(result.tokens) - result.decided


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """What decoding took, all answers together."""
    forwards, written = sum(r.nfe for r in results), sum(r.decided for r in results)
    return {
        "forwards": forwards,
        "probes": sum(r.probes for r in results),
        "computed": sum(r.computed for r in results),
        "tokens_per_forward": round(written / max(1, forwards), 3),
        "queue_seconds": round(max(r.queue_seconds for r in results), 6),
        "seconds": round(max(r.seconds for r in results), 6),
        "sampler": results[0].sampler,
        "cache": results[0].cache,
        "seed": results[0].seed,
    }


class Entry(NamedTuple):
    """A token, its text, its log-probability (None: it has none), the likeliest at its place."""

    token: int
    text: str
    logprob: float | None
    top: list[tuple[int, float]]


def entries(choice: Choice, ask: GenerateRequest, spelling: Spelling) -> list[Entry]:
    """The tokens of an answer, whose texts together are its text; their log-probabilities are those
    of their commits.  Behind those of the prompt where it is repeated."""
    result, hole = choice.result, ask.suffix is not None
    said = [i for i, step in enumerate(result.order) if step >= 0 or not hole]
    before = result.tokens[max(0, said[0] - BEFORE) : said[0]] if hole else []  # the text goes on
    kept = [i for i in said if result.tokens[i] not in spelling.special]
    pieces = spelling.pieces([*before, *(result.tokens[i] for i in kept)])[len(before) :]
    texts, left = dict(zip(kept, pieces, strict=True)), len(choice.text if hole else result.text)
    whole = hole and "stop_strings" not in ask.arguments  # all tokens of the hole are its text
    tops: dict[int, list[tuple[int, float]]] = {}  # candidates in the step of the last commit
    if result.trace is not None and (ask.logprobs or ask.logprob_ids):
        for step in result.trace.steps:
            taken = {position for position, _, _ in step.commits}
            tops |= {at: candidates for at, candidates in step.candidates if at in taken}
    found = given_entries(choice.given, ask, spelling) if ask.echo and choice.given else []
    for i in said:
        text = texts.get(i, "") if left > 0 or whole else ""  # an end, or behind a stop string
        if not ask.echo and (i not in texts or (left <= 0 and not whole)):
            continue  # readers of an echo count on every token
        others = tops.get(result.prompt_length + i, [])
        if ask.logprob_ids:
            others = [one for one in others if one[0] in ask.logprob_ids]
        else:
            others = others[: ask.logprobs]
        text = text if whole else text[:left]
        found.append(Entry(result.tokens[i], text, float(result.logprobs[i]), others))
        left -= len(text)
    return found


def given_entries(given: TokenScores, ask: GenerateRequest, spelling: Spelling) -> list[Entry]:
    """The tokens of a prompt.  The first one has nothing before it, and so no log-probability."""
    ids, most = given.tokens.tolist(), ask.prompt_logprobs or 0
    scores = given.logprobs.tolist()
    tops = zip(given.top_tokens.tolist(), given.top_logprobs.tolist(), strict=True)
    return [
        Entry(token, text, score if at else None, [*zip(*top, strict=True)][:most] if at else [])
        for at, (token, text, score, top) in enumerate(
            zip(ids, spelling.pieces(ids), scores, tops, strict=True)
        )
    ]


def chat_logprobs(found: Sequence[Entry], name: Name) -> list[dict[str, Any]]:
    """Log-probabilities as the chat API shapes them."""

    def shaped(token: int, text: str | None, logprob: float | None) -> dict[str, Any]:
        said = name(token, text)
        data = [*(said if text is None else text).encode()]
        return {"token": said, "logprob": _finite(logprob or 0.0), "bytes": data}

    return [
        shaped(one.token, one.text, one.logprob) | {"top_logprobs": [
            shaped(other, one.text if other == one.token else None, q) for other, q in one.top
        ]} for one in found
    ]  # fmt: skip


def text_logprobs(found: Sequence[Entry], name: Name) -> dict[str, Any]:
    """Log-probabilities as the completions API shapes them."""
    offsets = itertools.accumulate((len(one.text) for one in found), initial=0)
    return {
        "tokens": [name(one.token, one.text) for one in found],
        "token_logprobs": [None if one.logprob is None else _finite(one.logprob) for one in found],
        "top_logprobs": [
            None if one.logprob is None else
            {name(one.token, one.text): _finite(one.logprob)}
            | {name(other, None): _finite(q) for other, q in one.top if other != one.token}
            for one in found
        ],
        "text_offset": [*offsets][: len(found)],
    }  # fmt: skip


def prompt_logprobs(found: Sequence[Entry], name: Name) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt as vLLM shapes them."""

    def shaped(one: Entry) -> dict[str, Any]:
        ranks = {token: at for at, (token, _) in enumerate(one.top, 1)}
        every = [*one.top, *([] if one.token in ranks else [(one.token, one.logprob or 0.0)])]
        return {
            str(token): {"logprob": _finite(q), "rank": ranks.get(token),
                         "decoded_token": name(token, None)} for token, q in every
        }  # fmt: skip

    return [None if one.logprob is None else shaped(one) for one in found]


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this."""
    return round(logprob, 6) if math.isfinite(logprob) else -9999.0
