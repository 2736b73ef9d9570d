"""A streamed answer: events of the engine in, server-sent events out."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..runtime.events import Event
from ..runtime.handle import Handle
from .replies import PING, Choice, Reply, tokens_used
from .requests import GenerateRequest
from .service import Service, Started, cancel_all
from .tools import Parser, Said

HEARTBEAT = 15.0  # seconds without a chunk after which a comment keeps the connection open


@dataclass
class Shown:
    """What the client has of one choice."""

    text: str = ""  # everything final, before a suffix is cut off
    prefix: str = ""  # given text that the engine reports with the first event
    sent: int = 0  # characters of it
    began: bool = False  # a chunk with text went out
    steps: int = 0
    seen: int = 0  # positions whose text is final
    tokens: int = 0  # of these, written, and neither given nor of a draft
    length: int = 0  # positions of the answer, as the client knows it
    choice: Choice | None = None
    parser: Parser | None = None  # of calls and thoughts
    said: Said = field(default_factory=Said)  # what of these was sent


@dataclass
class Stream:
    """The chunks of one request.  Iterate once."""

    service: Service
    ask: GenerateRequest
    reply: Reply
    started: Started
    arrived: float
    shown: list[Shown] = field(default_factory=list)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Chunks as they come.  Whatever happens, no handle is left at work."""
        self.shown = [Shown() for _ in self.started.handles]
        # One event is in hand while the next is made: a reader that is slow makes the handles
        # merge events, never the engine wait.
        queue: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(1)
        readers = [
            asyncio.create_task(self._read(index, handle, queue))
            for index, handle in enumerate(self.started.handles)
        ]
        begun = False  # nothing is said before the first event: an error until then is a status
        try:
            while any(shown.choice is None for shown in self.shown):
                try:
                    # Not `wait_for`: before Python 3.12 it may lose a cancellation.
                    async with asyncio.timeout(HEARTBEAT):
                        index, item = await queue.get()
                except TimeoutError:
                    yield PING
                    continue
                if isinstance(item, BaseException):
                    raise item
                chunks, begun = [] if begun else self.reply.opening(), True
                if chunks := [*chunks, *self._chunks(index, item)]:  # all that it says in one write
                    yield b"".join(map(self.reply.encode, chunks))
            choices = [shown.choice for shown in self.shown if shown.choice is not None]
            results = [choice.result for choice in choices]
            self.service.answered(self.reply.id, results, self.arrived)
            last = self.reply.totals(choices) if self.ask.include_usage else []
            yield b"".join([*map(self.reply.encode, last), self.reply.end])
        finally:
            cancel_all(self.started.handles)
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, index: int, handle: Handle, queue: asyncio.Queue[Any]) -> None:
        try:
            async for happened in handle:
                await queue.put((index, happened))
        except Exception as error:
            await queue.put((index, error))

    def _chunks(self, index: int, happened: Event) -> list[dict[str, Any]]:
        """What one event is to the client."""
        ask, shown = self.ask, self.shown[index]
        if not any(one.steps for one in self.shown):
            self.service.metrics.observe("first_draft_seconds", time.monotonic() - self.arrived)
        if not shown.steps:
            prompt = happened.canvas.tokens[: happened.canvas.prompt_length]
            shown.parser = self.service.chats.parser(ask, prompt)
            shown.text = self.service.spelling.decode(prompt.tolist()) if ask.echo else ""
        shown.steps += 1
        shown.text += happened.text
        if happened.result is not None:
            shown.choice = self.service.choice(ask, happened.result, self.started.given[index])
        chunks: list[dict[str, Any]] = []
        if ask.drafts:
            chunks += self._frames(index, happened)
        delta = self._delta(shown, self._final(shown, happened))
        if delta:
            if not any(one.began for one in self.shown):
                self.service.metrics.observe("first_text_seconds", time.monotonic() - self.arrived)
            chunks += self.reply.chunk(index, delta, not shown.began)
            shown.began = True
        if shown.choice is not None:
            chunks += self.reply.last(index, shown.choice)
        if ask.usage_with_each:
            self._count(shown, happened)
            counted = tokens_used(
                sum(handle.prompt_tokens for handle in self.started.handles[:: ask.n]),
                sum(shown.tokens for shown in self.shown),
            )
            chunks = [chunk | {"usage": counted} for chunk in chunks]
        return chunks

    def _delta(self, shown: Shown, text: str | None) -> dict[str, Any]:
        """What the client gets of ``text``, of a chat calls and thoughts apart; {} for nothing."""
        if shown.parser is None:
            return {} if text is None else {"content" if self.ask.kind == "chat" else "text": text}
        if text:
            shown.parser.feed(text)
        if shown.choice is not None:
            shown.parser.end()
            shown.choice = replace(shown.choice, said=shown.parser.said)
        before, said = shown.said, shown.parser.said
        shown.said = replace(said, calls=[*said.calls])
        delta: dict[str, Any] = {}
        if len(said.reasoning) > len(before.reasoning):
            delta["reasoning_content"] = said.reasoning[len(before.reasoning) :]
        if len(said.content) > len(before.content):
            delta["content"] = said.content[len(before.content) :]
        calls: list[dict[str, Any]] = []
        for at, call in enumerate(said.calls):
            if at >= len(before.calls):
                calls.append({"index": at, **call.body()})
            elif piece := call.arguments[len(before.calls[at].arguments) :]:
                calls.append({"index": at, "function": {"arguments": piece}})
        if calls:
            delta["tool_calls"] = calls
        if not delta and shown.choice is not None and not shown.began:
            return {"content": ""}
        return delta

    def _count(self, shown: Shown, happened: Event) -> None:
        """Bring the number of tokens up to date."""
        if shown.choice is not None:
            shown.tokens = shown.choice.result.decided
        else:
            first, news = happened.canvas.prompt_length + shown.seen, len(happened.tokens)
            shown.seen += news
            shown.tokens += int((happened.canvas.commit_step[first : first + news] >= 0).sum())

    def _final(self, shown: Shown, happened: Event) -> str | None:
        """What has become final and was not sent; None when there is nothing to send."""
        ready = shown.text
        if shown.choice is not None:
            ready = shown.choice.text
        elif self.ask.suffix is not None:
            canvas = happened.canvas
            if not shown.prefix:
                given = canvas.tokens[canvas.prompt_length : canvas.start].tolist()
                shown.prefix = self.service.spelling.decode(given)
            full = not canvas.masked[canvas.start : canvas.end].any()
            # Once the hole is full the suffix stands behind it: the last event says where it ends.
            # Before it a stop string may hold back the end of what was given.
            begun = not full and ready.startswith(shown.prefix)
            ready = ready[len(shown.prefix) :] if begun else ""
        piece, shown.sent = ready[shown.sent :], max(shown.sent, len(ready))
        return piece if piece or (shown.choice is not None and not shown.began) else None

    def _frames(self, index: int, happened: Event) -> list[dict[str, Any]]:
        """The canvas, as positions from the start of the answer."""
        canvas, shown, ids = happened.canvas, self.shown[index], self.ask.token_ids
        base, piece = canvas.prompt_length, self.service.spelling.piece

        def item(position: int, token: int, *more: float) -> list[Any]:
            return [position - base, piece(token), *more, *([token] if ids else [])]

        frames: list[dict[str, Any]] = []
        more = sum(edit.added - edit.removed for edit in happened.edits)
        if shown.steps == 1:
            begun = ~canvas.masked & (canvas.commit_step < 0)  # given, or left of a draft
            shown.length = len(canvas.tokens) - base - more
            frames.append({
                "type": "canvas", "index": index, "length": shown.length,
                "window": [at - base for at in happened.window],
                "given": [
                    [at - base, piece(int(canvas.tokens[at]))]
                    for at in begun.nonzero()[0].tolist() if at >= base or self.ask.trace
                ],
            })  # fmt: skip
        probabilities = canvas.logprob
        frame: dict[str, Any] = {
            "type": "step", "index": index, "step": happened.step,
            "window": [at - base for at in happened.window],
            "commit": [
                item(at, token, round(math.exp(min(0.0, probabilities[at])), 4))
                for at, token in sorted(happened.committed.items())
            ],
            "draft": [item(at, token) for at, token in sorted(happened.drafts.items())],
            "remask": [at - base for at in happened.remasked],
            "forwards": canvas.nfe, "computed": canvas.computed,
        }  # fmt: skip
        if happened.edits:
            frame["edits"] = [[e.at - base, e.removed, e.added, e.token] for e in happened.edits]
            shown.length += more
        if canvas.length - base < shown.length:
            frame["end"] = canvas.length - base
        if self.ask.drafts == "text":
            result = happened.result
            frame["text"] = shown.text + happened.draft if result is None else result.text
        return [*map(self.reply.frame, [*frames, frame])]
