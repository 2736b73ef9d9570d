"""``/v1/verify``: devices draft, this server verifies the drafts of all of them in one forward.

``open`` {vocabulary, prompt, seed, repetition, max_new_tokens, temperature, top_p, top_k} -> {sid,
vocab_size, stop_ids, limit}; ``step`` {sid, base_len, tokens, parents} -> {base_len, tokens,
accepted, finish_reason}; ``close`` {sid}.  ``tokens`` of a reply are what the text gets, the last
of them the verifier's own.  Only ids and the seed travel: drafts are taken for guesses, so that
what is written never depends on the device.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..drafting.bridges.remote import OTHER_VOCABULARY
from ..drafting.vocabulary import fingerprint
from ..errors import PromptError, one_line
from .bodies import DeviceBody
from .http import Path, as_json, read_json
from .problems import Problem
from .speculation import SpeculativeSession

PATH = "/v1/verify"
LARGEST = 1 << 24  # bytes
PATIENCE = 60.0  # seconds


class VerifyRoutes:
    """The texts of devices in ``session``."""

    def __init__(self, session: SpeculativeSession) -> None:
        self.session = session
        model = session.model
        self.vocabulary = "" if model.tokenizer is None else (
            fingerprint(model.tokenizer, model.facts.vocab_size)
        )  # fmt: skip

    def paths(self) -> list[Path]:
        return [("POST", PATH + "/{action}", self.answer)]

    async def answer(self, request: Request) -> Response:
        message = await read_json(request, LARGEST)
        actions = {"open": self._open, "step": self._step, "close": self._close}
        action = request.path_params["action"]
        if action not in actions or not isinstance(message, dict):
            raise Problem(400, f"messages are objects to {', '.join(actions)}", code="invalid_body")
        try:
            work = asyncio.wrap_future(actions[action](message))
            return as_json(await asyncio.wait_for(work, PATIENCE))
        except TimeoutError:
            raise Problem(504, "no answer in time", code="late") from None
        except KeyError as error:
            raise Problem(
                400, f"the message lacks {one_line(error, 200)}, or names no text"
            ) from None

    def _open(self, message: dict[str, Any]) -> Any:
        if self.vocabulary and message["vocabulary"] != self.vocabulary:
            raise Problem(
                409, "device and verifier use different vocabularies: draft with a model that was "
                "trained on the verifier's tokenizer", code=OTHER_VOCABULARY,
            )  # fmt: skip
        prompt, size = message["prompt"], self.session.model.facts.vocab_size
        right = isinstance(prompt, list) and prompt and all(
            type(i) is int and 0 <= i < size for i in prompt
        )  # fmt: skip
        if not right:
            raise PromptError("prompt is a list of the verifier's token ids")
        given = DeviceBody.read(
            {k: v for k, v in message.items() if k not in ("vocabulary", "prompt")}
        )
        how = given.given
        repetition = how.pop("repetition", 0)
        return self.session.open(np.asarray(prompt, np.int64), repetition, how)

    def _step(self, message: dict[str, Any]) -> Any:
        names = ("sid", "base_len", "tokens")
        sid, base, tokens = (message[name] for name in names)
        return self.session.step(str(sid), base, tokens, message.get("parents"))

    def _close(self, message: dict[str, Any]) -> Any:
        return self.session.forget(str(message["sid"]))
