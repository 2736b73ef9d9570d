"""The server's side of drafts: `remote` describes the messages, `dllm.serve` carries them."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np

from ...canvas import IntArray
from ...errors import ConfigError
from ..base import Budget, Drafter, DraftRequest
from .follow import TextFollower

MOST_SESSIONS = 256
LONGEST_WAIT = 60.0  # seconds that a message without a deadline waits for its turn


class VocabularyError(ConfigError):
    """Verifier and drafter number their tokens differently."""


class Service:
    """The server's side: sessions by id.  ``vocabulary`` is the fingerprint clients must have.

    Messages are answered one after the other, because sessions share a network.  Nothing can
    interrupt a draft, but a message whose deadline passed while it waited is not worked on, and a
    session whose draft failed or came late is closed: its client has given it up.
    """

    def __init__(self, drafter: Drafter, vocabulary: str = "") -> None:
        if drafter.needs_scores:
            raise ConfigError(
                "token_recycling learns from the verifier's scores, which do not travel: "
                "use it on the verifier's side, and serve another drafter"
            )
        self.drafter, self.vocabulary = drafter, vocabulary
        self.sessions: dict[str, TextFollower] = {}
        self.lock = threading.Lock()

    def handle(
        self, action: str, message: dict[str, Any], arrived: float | None = None
    ) -> dict[str, Any]:
        """The answer to a message that came at ``arrived`` (of `time.monotonic`; default now).

        Raises `DllmError`, `KeyError`, `TypeError` or `ValueError` on a bad one, `TimeoutError`
        when its deadline has passed.
        """
        actions = {"open": self._open, "draft": self._draft, "close": self._close}
        if action not in actions:
            raise ConfigError(f"unknown action {action!r}")
        until = patience_of(message) + (time.monotonic() if arrived is None else arrived)
        seconds = max(0.0, until - time.monotonic())
        if not seconds or not self.lock.acquire(timeout=seconds):
            raise TimeoutError("busy with the drafts of others")
        try:
            return actions[action](message, until)
        finally:
            self.lock.release()

    def _open(self, message: dict[str, Any], until: float) -> dict[str, Any]:
        if self.vocabulary and message["vocabulary"] != self.vocabulary:
            raise VocabularyError(
                "verifier and drafter use different vocabularies: serve a drafter that was trained "
                "on the verifier's tokenizer"
            )
        prompt = np.asarray([int(i) for i in message["prompt"]], np.int64)
        request = DraftRequest(
            prompt, int(message["vocab_size"]),
            tuple(message["stop_ids"]), int(message["limit"]), float(message["temperature"]),
            tuple(message["noise_key"]), tuple(message["draft_key"]),
        )  # fmt: skip
        sid, drafter = str(message["sid"]), self.drafter
        if message.get("w") is not None:
            drafter = with_window(drafter, int(message["w"]))
        self._forget(sid)
        while len(self.sessions) >= MOST_SESSIONS:
            self._forget(next(iter(self.sessions)))
        self.sessions[sid] = TextFollower(drafter.open(request), prompt)
        return {"sid": sid}

    def _draft(self, message: dict[str, Any], until: float) -> dict[str, Any]:
        sid = str(message["sid"])
        session = self.sessions.pop(sid)  # it comes back, as the latest, when all went well
        try:
            tokens = _extended(session, message)
            if len(tokens) != message["base_len"]:
                raise ConfigError(f"{len(tokens)} tokens are known, not {message['base_len']}")
            k = int(message["k"])
            draft = session.propose(tokens, Budget(k, k))
            if time.monotonic() > until:
                raise TimeoutError("the draft came too late")
        except BaseException:
            session.close()
            raise
        self.sessions[sid] = session
        return {
            "sid": sid, "base_len": len(tokens), "tokens": draft.tokens.tolist(),
            "parents": None if draft.parents is None else draft.parents.tolist(), "end": draft.end,
        }  # fmt: skip

    def _close(self, message: dict[str, Any], until: float) -> dict[str, Any]:
        session = self.sessions.get(str(message["sid"]))
        if session is not None and message.get("commit"):
            session.follow(_extended(session, message))
        self._forget(str(message["sid"]))
        return {"sid": message["sid"]}

    def _forget(self, sid: str) -> None:
        session = self.sessions.pop(sid, None)
        if session is not None:
            session.close()


def patience_of(message: dict[str, Any]) -> float:
    """Seconds that the sender of a message waits for the answer."""
    seconds = float(message.get("deadline_ms", math.inf)) / 1000
    return min(max(0.0, seconds), LONGEST_WAIT)


def _extended(session: TextFollower, message: dict[str, Any]) -> IntArray:
    commit = np.asarray([int(i) for i in message["commit"]], np.int64)
    return np.concatenate([session.tokens, commit])


def with_window(drafter: Drafter, window: int) -> Drafter:
    """``drafter`` with every diffusion model in it seeing ``window`` masks."""
    inner = getattr(drafter, "drafters", None)
    if inner is not None:
        inner = tuple(with_window(one, window) for one in inner)
        return replace(drafter, drafters=inner)  # type: ignore[call-arg]
    return replace(drafter, window=window) if drafter.name == "diffusion" else drafter  # type: ignore[call-arg]
