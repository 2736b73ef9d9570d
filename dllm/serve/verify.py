"""``/v1/verify``: devices draft, this server verifies the drafts of all of them in one forward.

``open`` {vocabulary, prompt, seed, repetition, max_new_tokens, temperature, top_p, top_k} -> {sid,
vocab_size, stop_ids, limit}; ``step`` {sid, base_len, tokens, parents} -> {base_len, tokens,
accepted, finish_reason}; ``close`` {sid}.  ``tokens`` of a reply are what the text gets, the last
of them the verifier's own.  Only ids and the seed travel: drafts are taken for guesses, so that
what is written never depends on the device.
"""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..core.canvas import IntArray
from ..core.errors import ConfigError, PromptError, one_line
from ..drafting.base import Draft
from ..drafting.device import PATH, RemoteDrafts
from ..drafting.vocabulary import fingerprint
from ..request.prompts import check_ids
from ..runtime.events import Event
from ..runtime.handle import Handle
from ..session import Session
from .bodies import DeviceBody, DraftBody, EndBody
from .http import Path, as_json
from .problems import Problem
from .reading import Reader

KINDS: dict[str, Callable[[Any], DeviceBody | EndBody]] = {
    "open": DeviceBody.read, "step": DraftBody.read, "close": EndBody.read
}  # fmt: skip
PATIENCE = 60.0  # seconds
MOST_TEXTS = 256  # of all devices
LONGEST_DRAFT = 64
OTHER_VOCABULARY = "other_vocabulary"  # an error after which nobody asks again


@dataclass(eq=False)
class DeviceText:
    """A text that a device drafts for.  ``length`` of ``limit`` tokens are known to it; ``news``
    is the round that is being verified."""

    owner: str
    handle: Handle
    drafts: RemoteDrafts
    length: int
    limit: int
    events: AsyncIterator[Event]
    news: asyncio.Future[Event] | None = None
    seen: float = field(default_factory=time.monotonic)


class VerifyRoutes:
    """The texts of devices in ``session``."""

    def __init__(self, session: Session, reader: Reader) -> None:
        self.session, self.reader = session, reader
        self.texts: dict[str, DeviceText] = {}
        model = session.model
        self.vocabulary = "" if model.tokenizer is None else (
            fingerprint(model.tokenizer, model.facts.vocab_size)
        )  # fmt: skip

    def paths(self) -> list[Path]:
        return [Path("POST", PATH + "/{action}", self.answer)]

    async def answer(self, request: Request) -> Response:
        read = KINDS.get(request.path_params["action"])
        if read is None:
            raise Problem(400, f"messages are to {', '.join(KINDS)}", code="invalid_body")
        body = await self.reader.read(request, read)
        try:
            if isinstance(body, DeviceBody):
                return as_json(self._open(body, request.client.host if request.client else ""))
            if isinstance(body, DraftBody):
                return as_json(await self._step(body))
            assert isinstance(body, EndBody)
            self._forget(body.sid)
            return as_json({"sid": body.sid})
        except KeyError as error:
            raise Problem(400, f"sid {one_line(error, 200)} is no text of this server") from None

    def _open(self, body: DeviceBody, owner: str) -> dict[str, Any]:
        if self.vocabulary and body.vocabulary != self.vocabulary:
            raise Problem(409, "device and verifier use different vocabularies: draft with a model "
                          "that was trained on the verifier's tokenizer",
                          code=OTHER_VOCABULARY)  # fmt: skip
        prompt = check_ids(self.session.model, body.prompt)
        drafts, sid, facts = RemoteDrafts(), uuid.uuid4().hex, self.session.model.facts
        length = {} if body.max_new_tokens is None else {"max_new_tokens": body.max_new_tokens}
        handle = self.session.submit(
            prompt, repetition=body.repetition, drafter=drafts, controller="full", **length,
            **body.how,
        )  # fmt: skip
        while len(self.texts) >= MOST_TEXTS:
            self._forget(self._dispensable(owner))
        limit, events = handle.positions, aiter(handle)
        self.texts[sid] = DeviceText(owner, handle, drafts, len(prompt), limit, events)
        return {"sid": sid, "vocab_size": facts.vocab_size, "limit": limit,
                "stop_ids": list(facts.stop_token_ids)}  # fmt: skip

    def _dispensable(self, owner: str) -> str:
        """Of whoever has the most texts, ``owner`` before others, the one silent for longest."""
        counts = Counter(text.owner for text in self.texts.values())
        most = max(counts, key=lambda name: (counts[name], name == owner))
        mine = [sid for sid, text in self.texts.items() if text.owner == most]
        return min(mine, key=lambda sid: self.texts[sid].seen)

    async def _step(self, body: DraftBody) -> dict[str, Any]:
        sid, text = body.sid, self.texts[body.sid]
        text.seen = time.monotonic()
        if text.news is not None:
            if not text.news.done():
                raise ConfigError("a draft of this text is being verified: wait for the answer")
            self._learn(sid, text)  # what came too late for the step before
            text = self.texts[sid]
        if body.base_len != text.length:
            raise PromptError(f"the text has {text.length} tokens, base_len is {body.base_len}")
        text.drafts.offer(drafted(check_ids(self.session.model, body.tokens), body.parents))
        self.session.wake()
        text.news = asyncio.ensure_future(anext(text.events))
        done, _ = await asyncio.wait({text.news}, timeout=PATIENCE)
        if not done:
            raise Problem(504, "no answer in time", code="late")
        return self._learn(sid, text)

    def _learn(self, sid: str, text: DeviceText) -> dict[str, Any]:
        """What a round did to a text; one that is complete, or failed, is forgotten."""
        assert text.news is not None
        news, text.news = text.news, None
        try:
            event = news.result()
        except BaseException:
            self._forget(sid)
            raise
        text.length += len(event.tokens)
        if event.result is not None:
            self._forget(sid)
        return {
            "base_len": text.length, "tokens": event.tokens, "accepted": event.accepted,
            "finish_reason": None if event.result is None else event.result.finish_reason,
        }  # fmt: skip

    def _forget(self, sid: str) -> None:
        text = self.texts.pop(sid)
        text.handle.cancel()
        if text.news is not None and not text.news.cancel() and not text.news.cancelled():
            text.news.exception()  # nobody waits for it any more


def drafted(tokens: IntArray, parents: list[int] | None) -> Draft:
    """A chain, whose first tokens are taken, or a tree; `PromptError` for none or too deep ones."""
    if parents is None:
        return Draft(tokens[:LONGEST_DRAFT])
    depths = {-1: 0}
    for node, parent in enumerate(parents):
        if parent not in depths or (depth := 1 + depths[parent]) > LONGEST_DRAFT:
            raise PromptError(f"parents stand before their children, at most {LONGEST_DRAFT} deep")
        depths[node] = depth
    if len(parents) != len(tokens):
        raise PromptError(f"{len(tokens)} tokens have {len(parents)} parents")
    return Draft(tokens, np.asarray(parents, np.int64))
