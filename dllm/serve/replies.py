"""Answers on the wire: whole bodies, and the chunks of a stream."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..runtime.result import Result
from .problems import Problem
from .requests import GenerateRequest
from .tools import Said

PREFIXES = {"chat": "chatcmpl", "text": "cmpl", "infill": "infill"}
OBJECTS = {"chat": "chat.completion", "text": "text_completion", "infill": "infill"}
CHUNKS = {"chat": "chat.completion.chunk", "text": "text_completion", "infill": "infill.chunk"}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

Piece = Callable[[int, bool], str]  # a token's text, in the middle of a text or as its first


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(value) + b"\n\n"


@dataclass(frozen=True)
class Choice:
    """One finished answer.  ``text`` is what the client gets, of ``result``; ``said`` the calls and
    thoughts in the text of a chat."""

    result: Result
    text: str
    said: Said | None = None


@dataclass(frozen=True)
class Reply:
    """What all parts of an answer to ``ask`` have in common."""

    ask: GenerateRequest
    model: str
    fingerprint: str
    piece: Piece
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        if not self.id:
            name = f"{PREFIXES[self.ask.kind]}-{secrets.token_hex(12)}"
            object.__setattr__(self, "id", name)

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
        return self._head(OBJECTS[ask.kind]) | {
            "choices": listed, "usage": usage(ask, results), "dllm": figures(results)
        }  # fmt: skip

    end: ClassVar[bytes] = DONE

    @staticmethod
    def encode(value: Mapping[str, Any]) -> bytes:
        """An event on the wire."""
        return event(value)

    def error(self, problem: Problem) -> dict[str, Any]:
        """The event that ends a stream which failed."""
        return problem.body()

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
        entry: dict[str, Any] = {"index": index}
        empty: dict[str, Any] = {"delta": {}} if self.ask.kind == "chat" else {"text": ""}
        entry |= empty
        if self.ask.kind == "infill":
            entry["holes"] = choice.result.holes
        return [self._chunk([entry | self._ending(choice)])]

    def totals(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """The usage chunk, after all choices."""
        results = [choice.result for choice in choices]
        extra = {"usage": usage(self.ask, results), "dllm": figures(results)}
        return [self._chunk([]) | extra]

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
        hole = ask.suffix is not None
        said = [i for i, step in enumerate(result.order) if step >= 0 or not hole]
        if choice.said is not None and choice.said.calls:
            named = ask.tool_choice not in ("auto", "required")
            entry["finish_reason"] = "stop" if named else "tool_calls"
        if ask.logprobs is not None:
            shape = chat_logprobs if ask.kind == "chat" else text_logprobs
            entry["logprobs"] = shape(result, self.piece, ask.logprobs, said)
        if ask.token_ids:
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
    written = sum(written_tokens(result) for result in results)
    cached = sum(result.cached_tokens for result in results[:: ask.n])
    return tokens_used(prompt, written) | {"prompt_tokens_details": {"cached_tokens": cached}}


def tokens_used(prompt: int, written: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written
    }  # fmt: skip


def written_tokens(result: Result) -> int:
    """Tokens of the answer that were not given."""
    return sum(step >= 0 for step in result.order)


def given_tokens(result: Result) -> int:
    """Tokens of the prompt, and of what was fixed in the answer."""
    return result.prompt_length + len(result.tokens) - written_tokens(result)


def figures(results: Sequence[Result]) -> dict[str, Any]:
    """What decoding took, all answers together."""
    forwards, written = sum(r.nfe for r in results), sum(map(written_tokens, results))
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


def chat_logprobs(result: Result, piece: Piece, top: int, said: Sequence[int]) -> dict[str, Any]:
    """Log-probabilities at the commits of the positions ``said``, as the chat API shapes them."""
    tops = _alternatives(result) if top else {}
    content = []
    for i in said:
        others = tops.get(result.prompt_length + i, [])[:top]
        content.append({
            **_token(piece(result.tokens[i], i == 0), float(result.logprobs[i])),
            "top_logprobs": [_token(piece(other, i == 0), q) for other, q in others],
        })  # fmt: skip
    return {"content": content, "refusal": None}


def text_logprobs(result: Result, piece: Piece, top: int, said: Sequence[int]) -> dict[str, Any]:
    """Log-probabilities at the commits of the positions ``said``, as the completions API shapes
    them."""
    tops = _alternatives(result) if top else {}
    pieces = [piece(result.tokens[i], i == 0) for i in said]
    offsets = [0]
    for text in pieces[:-1]:
        offsets.append(offsets[-1] + len(text))
    return {
        "tokens": pieces,
        "token_logprobs": [_finite(float(result.logprobs[i])) for i in said],
        "top_logprobs": [
            {piece(other, i == 0): _finite(q)
             for other, q in tops.get(result.prompt_length + i, [])[:top]} for i in said
        ] if top else None,
        "text_offset": offsets[: len(pieces)],
    }  # fmt: skip


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this."""
    return round(logprob, 6) if math.isfinite(logprob) else -9999.0


def _alternatives(result: Result) -> dict[int, list[tuple[int, float]]]:
    """Position -> candidates in the step of its last commit."""
    tops: dict[int, list[tuple[int, float]]] = {}
    for step in result.trace.steps if result.trace is not None else ():
        taken = {position for position, _, _ in step.commits}
        tops |= {at: candidates for at, candidates in step.candidates if at in taken}
    return tops
