"""Structures without a finite automaton: llguidance says which texts are valid, a search finds one.

A row keeps a witness, a whole valid text that agrees with all that is decided and fits its canvas.
Each step looks for a likelier one from left to right, through the likeliest tokens of each
position.  Whatever subset of it is committed, the rest of it still completes the text.  It is not
the likeliest, and confidences are local.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..core.canvas import PATH, Canvas, IntArray
from ..core.errors import ConfigError
from .joint import Float64Array
from .vocabulary import Vocabulary

REMEMBERED = 64  # structures
TOP = 16  # tokens per position that are tried
WIDTH = 3  # texts that are followed at once
UNLIKELIER = 3.0  # nats that other tokens lie below the least likely of these
LONGEST = 32  # tokens that are looked for behind what is decided
CLOSINGS = 4  # such searches per step
# What closes a text, and what may stand where something has to.
CLOSERS = (*(bytes([c]) for c in b'"}])0'), b"null", *(bytes([c]) for c in range(32, 127)))
WAYS = 8  # of these that are tried behind one text


@dataclass
class Witness:
    """The witness of a row, from the end of its prompt to the end of its room; None at first."""

    tokens: tuple[int, ...] | None = None


class Text(NamedTuple):
    """A text that is followed: its ``tokens`` from the first undecided position on, how ``likely``
    and ``sure`` each is, whether it has ``ended``, and a known ``tail`` that would end it."""

    score: float
    judge: Any
    ended: bool
    tokens: tuple[int, ...]
    sure: tuple[float, ...]
    tail: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class Judged:
    """Which texts a canvas may hold, as `dllm.structured.format.Format`.

    ``start``: llguidance's matcher before the first token; ``first``: tokens of one valid text;
    ``stops``: stop ids, the first of which ends texts; ``ends``: these, and padding; ``closers``:
    tokens that are tried where a text is to end; ``blank``: those that no text begins with, since
    a blank is lost there.
    """

    start: Any
    first: tuple[int, ...]
    stops: tuple[int, ...]
    ends: frozenset[int]
    closers: tuple[int, ...]
    blank: frozenset[int]

    classes = None  # of tokens: their own probabilities are read
    literals = None

    def least(self) -> int:
        """Tokens of the shortest text that is known."""
        return len(self.first)

    def fits(self, canvas: Canvas) -> bool:
        """Whether the first witness completes what is decided within the canvas."""
        return self._witness(canvas) is not None

    def settled(self, canvas: Canvas, end: int) -> tuple[IntArray, IntArray]:
        """Nothing is written without asking the model."""
        return np.zeros(0, np.int64), np.zeros(0, np.int64)

    def _witness(self, canvas: Canvas) -> tuple[int, ...] | None:
        held, low = canvas.state(Witness), canvas.prompt_length
        whole = canvas.end == canvas.region[1]
        room = (max(canvas.end, canvas.start + canvas.cap) if whole else canvas.end) - low
        text = self.first if held.tokens is None else self._text(held.tokens)
        if len(text) > room:
            return None
        witness = (*text, *[self.stops[0]] * (room - len(text)))
        for at in np.flatnonzero(~canvas.masked[low : canvas.end]).tolist():
            if not self._same(int(canvas.tokens[low + at]), witness[at], at == len(text)):
                return None
        return witness

    def _same(self, token: int, wanted: int, ending: bool) -> bool:
        return token == wanted or (
            wanted in self.ends and token in (self.stops if ending else self.ends)
        )

    def _text(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """What stands before the end."""
        end = next((i for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tuple(tokens[:end])

    def complete(
        self, canvas: Canvas, targets: IntArray, ids: IntArray, logprob: Float64Array, heat: float
    ) -> tuple[IntArray, Float64Array, Float64Array] | None:
        """Tokens (n,) of one valid text at the undecided ``targets`` (n,) of a canvas, whose
        likeliest tokens are ``ids`` (n, k), of ``logprob`` (n, k): with their log-probabilities
        (n,) among the tokens that may stand there, and in the model.  ``heat``: a temperature,
        which adds noise if it is above 0.  None: what is decided has no witness."""
        witness = self._witness(canvas)
        if witness is None:
            return None
        score = logprob.astype(np.float64)
        if heat:
            keys = (targets[:, None] << 18 ^ ids) & 0xFFFFFFFF
            noise = canvas.uniform(PATH, keys.ravel()).reshape(keys.shape).astype(np.float64)
            score = score / heat - np.log(-np.log(noise.clip(1e-12, 1 - 1e-7)))
        low = canvas.prompt_length
        offers = {
            at - low: Offer(ids[i].tolist(), score[i].tolist(), logprob[i].tolist())
            for i, at in enumerate(targets.tolist()) if canvas.masked[at]
        }  # fmt: skip
        tokens, sure = Search(self, canvas, witness, offers).best()
        canvas.state(Witness).tokens = tokens
        at = targets - low
        token = np.array(tokens)[at]
        known = [
            offers[i].of(t)[1] if i in offers else 0.0
            for i, t in zip(at.tolist(), token.tolist(), strict=True)
        ]
        return token, np.array(sure)[at], np.array(known)

    def accepts(self, judge: Any, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` end a text."""
        if not tokens:
            return bool(judge.is_accepting())
        return bool(judge.validate_tokens([*tokens, self.stops[0]]) > len(tokens))

    def closing(
        self, judge: Any, room: int, hints: Sequence[tuple[int, ...]] = (), most: int = LONGEST
    ) -> tuple[int, ...] | None:
        """At most ``room`` tokens that end a text, one of the ``hints`` behind ``most`` others if
        possible; None: none was found."""
        level: list[tuple[Any, tuple[int, ...]]] = [(judge, ())]
        seen = set[bytes]()
        for _ in range(min(room, most) + 1):
            after: dict[bytes, tuple[Any, tuple[int, ...]]] = {}
            for here, path in level:
                for hint in ((), *hints):
                    if len(path) + len(hint) <= room and self.accepts(here, hint):
                        return (*path, *hint)
                forced = here.compute_ff_tokens()
                tried = 0
                for step in [forced] if forced else ([token] for token in self.closers):
                    if tried == WAYS or here.validate_tokens(step) < len(step):
                        continue
                    tried += 1
                    then = here.deep_copy()
                    if then.consume_tokens(step):
                        after.setdefault(then.compute_bitmask(), (then, (*path, *step)))
            # Blanks that may be repeated lead to what was there before: what is new has room, too.
            new = sorted(after, key=seen.__contains__)[: 2 * WIDTH]
            level = [after[mask] for mask in dict.fromkeys((*new, *[*after][:WIDTH]))]
            seen.update(after)
        return None


class Offer(NamedTuple):
    """The likeliest ``ids`` of a position, their scores and their log-probabilities."""

    ids: list[int]
    score: list[float]
    logprob: list[float]

    def of(self, token: int) -> tuple[float, float]:
        """Score and log-probability of a token; those of a token not listed are below all."""
        if token in self.ids:
            at = self.ids.index(token)
            return self.score[at], self.logprob[at]
        return min(self.score) - UNLIKELIER, self.logprob[-1] - UNLIKELIER


class Search:
    """One step's search of a row; positions count from the end of its prompt."""

    def __init__(
        self, form: Judged, canvas: Canvas, witness: tuple[int, ...], offers: Mapping[int, Offer]
    ) -> None:
        low, high = canvas.prompt_length, canvas.end
        self.form, self.witness, self.offers, self.room = form, witness, offers, len(witness)
        self.decided = {
            int(i): int(canvas.tokens[low + i]) for i in np.flatnonzero(~canvas.masked[low:high])
        }
        self.closings = 0  # that were searched for
        self.last, self.free = max(offers, default=-1) + 1, max(self.decided, default=-1) + 1
        # What the rest of the witness scores from a position on.
        self.rest = [0.0] * (self.room + 1)
        for i in range(self.last - 1, -1, -1):
            self.rest[i] = self.rest[i + 1] + (offers[i].of(witness[i])[0] if i in offers else 0.0)

    def best(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The likeliest text that was found, and how sure its tokens are."""
        form, witness = self.form, self.witness
        first = min(self.offers, default=self.room)
        own = [self.offers[i].of(t)[1] if i in self.offers else 0.0 for i, t in enumerate(witness)]
        begun, judge = form._text(witness[:first]), form.start.deep_copy()
        if begun:
            judge.consume_tokens([*begun])
        end = form._text(witness)
        level = [Text(0.0, judge, len(begun) < first, (), (), end[first:])]
        best = self.rest[first] if first < self.room else 0.0, witness, tuple(own)
        for i in range(first, self.last):
            level = self._further(level, i)
            for text in level:
                total = text.score + self.rest[i + 1]
                if total > best[0] and self._joins(text, end[i + 1 :], i + 1):
                    best = total, *self._whole(text, first, witness[i + 1 :], own[i + 1 :])
            if not level:
                break
        if self.free <= self.last:  # what comes behind is open
            for text in level:
                if text.score <= best[0]:
                    continue
                tail = () if text.ended else self._tail(text, self.last)
                if tail is not None:
                    stops = (form.stops[0],) * (self.room - self.last - len(tail))
                    best = text.score, *self._whole(text, first, (*tail, *stops), own[self.last :])
        return best[1], best[2]

    def _whole(
        self, text: Text, first: int, rest: Sequence[int], own: Sequence[float]
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        tokens = *self.witness[:first], *text.tokens, *rest
        return tokens, (*[0.0] * first, *text.sure, *own)

    def _joins(self, text: Text, rest: Sequence[int], at: int) -> bool:
        """Whether the rest of the witness, from a position on, completes a text."""
        if text.ended:
            return not rest
        ends = rest or self.decided.get(at, self.form.stops[0]) in self.form.stops
        return bool(ends) and self.form.accepts(text.judge, rest)

    def _further(self, level: Sequence[Text], i: int) -> list[Text]:
        """The likeliest texts that are one token longer."""
        ways = [(*way, text) for text in level for way in self._ways(text, i)]
        ways.sort(key=lambda way: (-way[1], way[0]))
        result: list[Text] = []
        for token, score, sure, text in ways:
            if len(result) == WIDTH:
                break
            ended, judge = text.ended or token in self.form.ends, text.judge
            if not ended:
                judge = judge.deep_copy()
                if not judge.consume_token(token):
                    continue
            tail = () if ended else text.tail[1:] if text.tail and text.tail[0] == token else None
            longer = Text(score, judge, ended, (*text.tokens, token), (*text.sure, sure), tail)
            if tail is None and self.free <= i + 1:
                tail = self._tail(longer, i + 1, text.tail)
                if tail is None:
                    continue
                longer = longer._replace(tail=tail)
            if tail and self.free <= i + 1 and len(tail) > self.room - i - 1:
                continue
            result.append(longer)
        return result

    def _tail(
        self, text: Text, at: int, before: tuple[int, ...] | None = None
    ) -> tuple[int, ...] | None:
        """What ends a text that has reached a position."""
        room = self.room - at
        if text.tail is not None and len(text.tail) <= room:
            return text.tail
        hints = [before[k:] for k in range(min(len(before), 4))] if before else []
        for hint in hints:
            if len(hint) <= room and self.form.accepts(text.judge, hint):
                return hint
        self.closings += 1
        return self.form.closing(text.judge, room, hints) if self.closings <= CLOSINGS else None

    def _ways(self, text: Text, i: int) -> Iterator[tuple[int, float, float]]:
        """The tokens that may follow a text at a position, its score with each, how sure it is."""
        form, offer = self.form, self.offers.get(i)
        if i in self.decided:
            if self._may(text, self.decided[i], i):
                yield self.decided[i], text.score, 0.0
            return
        if offer is None:  # it was not predicted
            yield from ((t, text.score, 0.0) for t in {self.witness[i]} if self._may(text, t, i))
            return
        fits = [(t, s, p) for t, s, p in zip(*offer, strict=True) if self._may(text, t, i)]
        more = self.witness[i], (text.tail or form.stops)[0]
        for token in dict.fromkeys(more):
            if token not in offer.ids and self._may(text, token, i):
                fits.append((token, *offer.of(token)))
        forced = len(fits) == 1 and not text.ended and bool(text.judge.compute_ff_bytes())
        seen = float(np.exp(offer.logprob).sum())
        mass = sum(float(np.exp(p)) for _, _, p in fits) + max(0.0, 1.0 - seen)
        for token, score, p in fits:
            yield token, text.score + score, 0.0 if forced else min(0.0, p - float(np.log(mass)))

    def _may(self, text: Text, token: int, i: int) -> bool:
        if i == 0 and token in self.form.blank:
            return False
        if text.ended:
            return token in self.form.ends
        if token in self.form.ends:
            return token in self.form.stops and bool(text.judge.is_accepting())
        return bool(text.judge.validate_tokens([token]) == 1)


# -- from a source ------------------------------------------------------------------------------


class _Tokens:
    """A vocabulary as llguidance reads it."""

    def __init__(self, pieces: Sequence[bytes | None], size: int, stop: int) -> None:
        self.eos_token_id, self.bos_token_id = stop, None
        padded = [*pieces, *[None] * (size - len(pieces))]
        self.tokens = [
            b"\xff<%d>" % i if p is None or i == stop else p for i, p in enumerate(padded)
        ]
        self.special_token_ids = [i for i, t in enumerate(self.tokens) if t.startswith(b"\xff<")]
        self.number = {t: i for i, t in reversed([*enumerate(self.tokens)])}
        self.longest = max(map(len, self.tokens))

    def __call__(self, text: bytes) -> list[int]:
        """The text in longest tokens."""
        result, at = list[int](), 0
        while at < len(text):
            for size in range(min(self.longest, len(text) - at), 0, -1):
                token = self.number.get(text[at : at + size])
                if token is not None:
                    break
            else:
                raise ConfigError("the model has no tokens for all bytes of a text")
            result.append(token)
            at += size
        return result


@lru_cache(4)
def _tokenizer(vocabulary: Vocabulary, size: int, stop: int) -> tuple[Any, _Tokens]:
    guidance = importlib.import_module("llguidance")
    tokens = _Tokens(vocabulary.pieces, size, stop)
    return guidance.LLTokenizer(guidance.TokenizerWrapper(tokens)), tokens


@lru_cache(REMEMBERED)
def judged(
    text: str, vocabulary: Vocabulary, stops: Sequence[int], pad: int, size: int,
    shortest: bytes | None,
) -> Judged | None:  # fmt: skip
    """A source, as JSON, that llguidance reads, a grammar in Lark; None where it is not installed,
    does not read it, or where no text of it is found.  ``shortest``: a text of it, if one is known.
    """
    ((kind, value),) = json.loads(text).items()
    try:
        guidance = importlib.import_module("llguidance")
    except ImportError:
        return None
    if kind not in ("json_schema", "open_schema", "grammar", "regex") or not stops:
        return None
    matcher = guidance.LLMatcher
    try:
        if kind.endswith("schema"):
            how = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
            grammar = matcher.grammar_from_json_schema(json.dumps(value), overrides=how)
        elif kind == "regex":
            grammar = matcher.grammar_from_regex(value)
        else:
            grammar = matcher.grammar_from_lark(value)
    except Exception:
        return None
    tokenizer, tokens = _tokenizer(vocabulary, size, stops[0])
    start = matcher(tokenizer, grammar, log_level=0)
    if start.get_error():
        return None
    singles = dict.fromkeys(tokens.number[c] for c in CLOSERS if c in tokens.number)
    blank = [i for i, p in enumerate(vocabulary.pieces) if p and p[:1] == b" "]
    form = Judged(
        start, (), tuple(stops), frozenset({*stops, pad} - {-1}), tuple(singles),
        frozenset(blank if vocabulary.strips else ()),
    )  # fmt: skip
    first = tuple(tokens(shortest)) if shortest is not None else None
    if first is None or not form.accepts(start, first):
        first = form.closing(start, 4 * LONGEST, most=4 * LONGEST)
    return None if first is None or {*first[:1]} & form.blank else replace(form, first=first)
