"""Whether two models speak the same token ids, and drafting across vocabularies when they do not.

Equal vocabulary sizes prove nothing: what counts is that ids stand for the same strings.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..core.canvas import IntArray
from ..core.errors import ConfigError
from ..models.model import special_tokens
from ..request.prompts import encode_text
from .base import EMPTY, Budget, Draft, Drafter, Drafting, DraftRequest, chain

PROBE = "def f(x):\n    return x ** 2  # naïve\n你好，世界 3.14159 1234567\t\t  \n👩‍🚀 Straße ΑΒΓ"
TAIL = 12  # committed tokens of the verifier that are encoded again with a draft


@dataclass(frozen=True)
class Comparison:
    """``match``: whether ids agree; of "same text" those of ordinary text do, of special tokens
    not.  ``to_drafter`` (Vv,) int64 maps verifier ids to drafter ids, -1 where there is none."""

    match: Literal["same", "same text", "different"]
    to_drafter: IntArray

    @property
    def foreign(self) -> tuple[int, ...]:
        """Verifier ids that this drafter must not propose: not the same token on both sides."""
        return tuple(np.flatnonzero(self.to_drafter != np.arange(len(self.to_drafter))).tolist())


def fingerprint(tokenizer: Any, vocab_size: int | None = None) -> str:
    """A short hash of id -> string, for ids below ``vocab_size``, and of the encoding of a probe
    text.  Spare rows of a model count for nothing."""
    digest = hashlib.sha256()
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if vocab_size is None or index < vocab_size:
            digest.update(f"{index}\0{token}\0".encode("utf-8", "surrogatepass"))
    digest.update(str(encode_text(tokenizer, PROBE)).encode())
    return digest.hexdigest()[:16]


def compare(drafter: Any, verifier: Any, drafter_size: int, verifier_size: int) -> Comparison:
    """Compare two tokenizers; sizes are those of the models' logits."""
    ours, theirs = drafter.get_vocab(), verifier.get_vocab()
    to_drafter = np.full(verifier_size, -1)
    for token, index in ours.items():
        other = theirs.get(token)
        if other is not None and index < drafter_size and other < verifier_size:
            to_drafter[other] = index
    special = {*drafter.get_added_vocab(), *verifier.get_added_vocab()}
    shared = {t for t in ours.keys() & theirs.keys() if t not in special}
    moved = any(ours[t] != theirs[t] for t in shared)
    text = encode_text(drafter, PROBE) == encode_text(verifier, PROBE)
    alone = (ours.keys() ^ theirs.keys()) - special
    if moved or alone or not text:
        return Comparison("different", to_drafter)
    agree = all(ours.get(t) == theirs.get(t) for t in special)
    return Comparison("same" if agree else "same text", to_drafter)


def reconcile(drafter: Drafter, model: Any, verifier: Any, policy: str) -> Drafter:
    """``drafter``, whose network is ``model``, made fit for ``verifier``.

    ``policy``: "auto" translates special tokens of the text, bans in drafts those whose ids
    differ, and refuses different vocabularies; "retokenize" drafts in the drafter's own.
    """
    ours, theirs = model.tokenizer, verifier.tokenizer
    if ours is None or theirs is None:
        if model.facts.vocab_size != verifier.facts.vocab_size:
            raise ConfigError(
                f"{model.name} and {verifier.name} have {model.facts.vocab_size} and "
                f"{verifier.facts.vocab_size} ids and not both a tokenizer to compare them by: "
                "pass tokenizers when loading"
            )
        return drafter
    if policy == "retokenize":
        return Retokenizing(inner=drafter, ours=ours, theirs=theirs, size=model.facts.vocab_size)
    result = compare(ours, theirs, model.facts.vocab_size, verifier.facts.vocab_size)
    if result.match == "same":
        return drafter
    if result.match == "same text":
        banned = tuple(i for i in result.foreign if i < model.facts.vocab_size)
        return replace(  # type: ignore[call-arg]
            drafter, banned=banned, known_as=result.to_drafter
        )
    raise ConfigError(
        f"{model.name} and {verifier.name} use different vocabularies, so its ids mean other text; "
        "pass vocabulary='retokenize', which carries drafts over as text"
    )


@dataclass
class Retokenizing(Drafter):
    """Drafts in another vocabulary and carries the text over; its distribution is POINT."""

    inner: Any = None
    ours: Any = None
    theirs: Any = None
    size: int = 0

    def open(self, request: DraftRequest) -> Drafting:
        prompt = _encode(self.ours, self.theirs, request.prompt)
        # the text may take more tokens here
        limit = len(prompt) + 4 * (request.limit - len(request.prompt)) + 64
        stops = _shared(self.theirs, self.ours, request.stop_ids)
        own = replace(request, prompt=prompt, vocab_size=self.size, stop_ids=stops, limit=limit)
        return _Retokenizing(self, self.inner.open(own))

    def __repr__(self) -> str:
        return f"retokenize({self.inner!r})"


class _Retokenizing(Drafting):
    """The inner drafter is told of no outcome: accepted lengths count in other tokens."""

    def __init__(self, part: Retokenizing, inner: Drafting) -> None:
        self.part, self.inner = part, inner

    def propose(self, prefix: IntArray, budget: Budget) -> Draft:
        part = self.part
        ours = _encode(part.ours, part.theirs, prefix)
        draft = self.inner.propose(ours, budget)
        if not len(draft):
            return EMPTY
        path = draft.tokens if draft.is_chain else draft.tokens[draft.path(len(draft) - 1)]
        tail = ours[-TAIL:].tolist()  # alone, a continuation may lose the blank in front of it
        before = part.ours.decode(tail)
        # incomplete bytes at the end decode to replacement characters
        both = part.ours.decode([*tail, *path.tolist()]).rstrip("\ufffd")
        text = both.removeprefix(before) if both.startswith(before) else ""
        return chain(self._in_context(prefix, text)[: budget.length], draft.source)

    def _in_context(self, prefix: IntArray, text: str) -> list[int]:
        """Ids of ``text`` as the verifier would write them after ``prefix``.

        A tail of the prefix is encoded together with the text.  The last token may go on beyond
        the text, so it is dropped unless it is all there is.
        """
        theirs, tail = self.part.theirs, prefix[-TAIL:].tolist()
        before = theirs.decode(tail)
        ids = encode_text(theirs, before + text)
        again = encode_text(theirs, before)
        if ids[: len(again)] != again:  # the border moved: the draft would not be reached
            return []
        fresh = ids[len(again) :]
        return fresh[:-1] if len(fresh) > 1 else fresh

    def close(self) -> None:
        self.inner.close()


def _encode(ours: Any, theirs: Any, ids: IntArray) -> IntArray:
    """The text of the verifier's ``ids`` in the drafter's tokens; special tokens by their name."""
    result: list[int] = []
    run: list[int] = []
    special = special_tokens(theirs)
    for index in [*ids.tolist(), None]:
        if index is not None and index not in special:
            run.append(index)
            continue
        if run:
            result += encode_text(ours, theirs.decode(run))
            run = []
        if index is not None:
            result += _shared(theirs, ours, (index,))
    return np.asarray(result or [0], np.int64)


def _shared(source: Any, target: Any, ids: tuple[int, ...]) -> tuple[int, ...]:
    """The ids under which ``target`` knows the same token strings."""
    vocabulary = target.get_vocab()
    names = [source.convert_ids_to_tokens(i) for i in ids]
    return tuple(vocabulary[name] for name in names if name in vocabulary)
