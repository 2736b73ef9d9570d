"""A device that drafts for a verifier behind HTTP (after SLED, arXiv 2506.09397).

The drafter is at hand, and ``dllm serve VERIFIER`` scores what it proposes, together with the
drafts of other devices.  There the drafts of a text come from `RemoteDrafts`.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from ..core.access import KEY
from ..core.canvas import IntArray
from ..core.errors import ConfigError, DllmError
from .accept.chains import walk
from .base import EMPTY, Budget, Draft, Drafter, Drafting, DraftRequest, Feedback
from .naming import DrafterLike, make_drafter
from .vocabulary import fingerprint

PATH = "/v1/verify"


def write_with(
    url: str, drafter: DrafterLike, prompt: IntArray, *, tokenizer: Any = None, length: int = 8,
    timeout: float = 60.0, **options: Any,
) -> Iterator[list[int]]:  # fmt: skip
    """Token ids that the verifier at ``url`` writes after ``prompt`` (P,) int64, round by round.

    ``drafter``: as for `dllm.speculate`; ``tokenizer`` says which vocabulary it uses (default: that
    of a diffusion model).  ``length``: tokens of a draft at most.  ``timeout``: seconds that a
    round may take.  ``options``: ``max_new_tokens``, ``temperature``, ``top_p``, ``top_k``,
    ``seed``, ``repetition``.  What is written is what the verifier would write alone.
    """
    part = make_drafter(drafter)
    if part is None:
        raise ConfigError("a device needs a drafter: name one")
    tokenizer = tokenizer or getattr(getattr(part, "model", None), "tokenizer", None)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"url is like 'http://127.0.0.1:8000', not {url!r}")
    key = os.environ.get(KEY)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with _Verifier(base_url=url, timeout=timeout, headers=headers, trust_env=False) as verifier:
        vocabulary = "" if tokenizer is None else fingerprint(tokenizer)
        known = verifier.ask(
            "open", {"vocabulary": vocabulary, "prompt": prompt.tolist(), **options}
        )
        request = DraftRequest(
            prompt, known["vocab_size"], tuple(known["stop_ids"]), known["limit"],
            float(options.get("temperature", 0.0)),
        )  # fmt: skip
        drafting, tokens, reason = TextFollower(part.open(request), prompt), prompt, None
        try:
            while reason is None:
                room = known["limit"] - len(tokens) - 1
                k = min(length, room)
                draft = drafting.propose(tokens, Budget(k, room)) if k > 0 else EMPTY
                message = {
                    "sid": known["sid"], "base_len": len(tokens), "tokens": draft.tokens.tolist(),
                    "parents": None if draft.parents is None else draft.parents.tolist(),
                }  # fmt: skip
                reply = verifier.ask("step", message)
                tokens = np.concatenate([tokens, np.asarray(reply["tokens"], np.int64)])
                reason = reply["finish_reason"]
                yield reply["tokens"]
        finally:
            drafting.follow(tokens)
            drafting.drafting.close()
            if reason is None:
                verifier.ask("close", {"sid": known["sid"]})


@dataclass
class TextFollower:
    """A drafter on one sequence; what became of a draft is read off the text that came next."""

    drafting: Drafting
    tokens: IntArray
    draft: Draft = EMPTY

    def propose(self, tokens: IntArray, budget: Budget) -> Draft:
        """A draft after ``tokens``, the whole text by now."""
        self.follow(tokens)
        self.draft = self.drafting.propose(tokens, budget)
        return self.draft

    def follow(self, tokens: IntArray) -> None:
        """Tell the drafter about everything in ``tokens`` that is new."""
        emitted: list[int] = tokens[len(self.tokens) :].tolist()
        if not emitted:
            return
        known = iter(emitted[:-1])  # the last one is the verifier's own
        path = walk(self.draft, lambda _: next(known, -1)).path
        self.drafting.observe(Feedback(self.draft, path, emitted))
        self.tokens, self.draft = tokens.copy(), EMPTY


class _Verifier(httpx.Client):
    """A connection to the verifier."""

    def ask(self, action: str, message: dict[str, Any]) -> dict[str, Any]:
        try:
            response = self.post(f"{PATH}/{action}", json=message)
            reply: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise DllmError(f"the verifier at {self.base_url} does not answer: {error}") from error
        if response.status_code != httpx.codes.OK:
            raise DllmError(f"the verifier at {self.base_url}: {reply['error']['message']}")
        return reply


@dataclass(eq=False)
class RemoteDrafts(Drafter):
    """The drafts of one text, one by one.  The text waits until the next one is offered."""

    outside = True

    offered: Draft | None = field(default=None, repr=False)

    def offer(self, draft: Draft) -> None:
        """Have ``draft`` verified next; it may be empty."""
        self.offered = draft

    def open(self, request: DraftRequest) -> Drafting:
        return _RemoteDrafting(self)


class _RemoteDrafting(Drafting):
    def __init__(self, part: RemoteDrafts) -> None:
        self.part = part

    @property
    def waits(self) -> bool:
        return self.part.offered is None

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        draft, self.part.offered = self.part.offered, None
        return EMPTY if draft is None else draft
