"""How long the holes of a text are, where it does not say: ``[[*]]``, ``[[4..32]]``.

A hole of another length than its text needs is filled wrongly, also by one position, so that it is
measured before anything is written.  All candidates are rows of one packed forward: texts that
differ in the length of one hole, all masks.  The length whose proposals are likeliest on average is
taken.  Candidates are powers of two, then every length between the neighbours of the best.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import cache as caches
from .. import samplers
from ..cache import Slots
from ..cache.base import full_plan
from ..core.canvas import BoolArray, Canvas, IntArray
from ..core.errors import PromptError, UnknownNameError, short
from ..core.text import hole_forms, holes_in
from ..engine import MaskedRecipe
from ..engine.forward import Forward
from ..engine.loop import CPU_BATCH
from ..engine.recipe import RowOptions
from ..engine.rows import Job, Row
from ..kernels.noise import uniform
from ..models import DiffusionModel
from ..samplers.compose import lengths as length_rules
from .prompts import (
    check_ids,
    encode_continuation,
    encode_holes,
    encode_text,
    tokenizer_of,
    without_forms,
)

OPEN = re.compile(r"\[\[(\*|\d{1,9}\.\.\d{1,9}|\d{1,9})\]\]")
MOST = 64  # positions of a ``[[*]]``
FIRST = 8  # positions of a hole that has not been measured yet
ALL = 32  # so many candidates are all tried at once
BATCH = 2048  # positions of a forward, on a processor those of its micro-batches

SURE = "sure"  # the length at which the proposals are likeliest on average


@dataclass(frozen=True)
class Measured:
    """A text with holes of known ``sizes``, or of sizes to begin with that stay within ``bounds``:
    ``ids`` (n,), any at the ``holes`` (n,) bool; ``probes`` forwards that it took to know them,
    which were fed ``computed`` positions."""

    ids: IntArray
    holes: BoolArray
    sizes: tuple[int, ...]
    probes: int = 0
    computed: int = 0
    bounds: tuple[tuple[int, int], ...] = ()


def measured(
    model: DiffusionModel, text: Any, before: IntArray, rule: str = SURE,
    before_forward: Callable[[], None] = lambda: None,
) -> Measured:  # fmt: skip
    """The text with every hole as long as it says, or as it seems to be by ``rule``.  ``before``
    (P,): the prompt.  ``before_forward`` is called before every forward; what it raises ends the
    call.  Raises `PromptError` for holes that are none."""
    if isinstance(text, Measured):
        return text
    known = [SURE, *length_rules(fills=True)]
    name = name_of(rule)
    if name not in known:
        raise UnknownNameError("length of holes", rule, known)
    for hole in holes_in(text):
        if hole.form and not hole.plain:
            raise PromptError(
                f"{short(text[hole.first : hole.behind])}: a hole with a regex says how many "
                "tokens it has, as [[8:[0-9]+]] does"
            )
    if not open_holes(text):
        return Measured(*encode_holes(model, text))
    if name != SURE and any(hole_forms(text)):
        raise PromptError(
            f"length={short(rule)} moves the text behind a hole, and others have a regex: leave it "
            "out, or write how long each hole is"
        )
    pieces = OPEN.split(without_forms(text))
    ranges = [_range(piece) for piece in pieces[1::2]]
    tokenizer = tokenizer_of(model)
    given = [
        (encode_continuation if i else encode_text)(tokenizer, piece) if piece else []
        for i, piece in enumerate(pieces[::2])
    ]
    for ids in given:
        check_ids(model, ids)
    room = model.facts.context_length - len(before) - sum(map(len, given))
    lengths = [min(max(low, FIRST), high) for low, high in ranges]
    if sum(low for low, _ in ranges) > room:
        raise PromptError(
            f"the holes have {sum(low for low, _ in ranges)} tokens at least, and the context has "
            f"room for {room}: shorten the text"
        )
    for piece, (low, high) in zip(pieces[1::2], ranges, strict=True):
        most = room - sum(low for low, _ in ranges) + low
        if piece != "*" and high > most:
            raise PromptError(
                f"[[{piece}]]: the context has room for {most} tokens there: lower it"
            )
    probe, bounds = _Probe(model, before, given, before_forward), list[tuple[int, int]]()
    for i, (low, high) in enumerate(ranges):
        taken = bounds if name != SURE else [(n, n) for n in lengths[:i]]
        later = sum(low for low, _ in ranges[i + 1 :])
        high = min(high, room - sum(most for _, most in taken) - later)
        bounds.append((low, high))
        lengths[i] = min(lengths[i], high)
        if low == high or name != SURE:
            continue
        powers = [1 << k for k in range(high.bit_length())]
        every = range(low, high + 1)
        candidates = sorted({low, high, *(every if len(every) <= ALL else powers)} & {*every})
        lengths[i] = probe.best(lengths, i, candidates)
        at = candidates.index(lengths[i])
        near = range(candidates[max(0, at - 1)], candidates[min(at + 1, len(candidates) - 1)] + 1)
        lengths[i] = probe.best(lengths, i, near)
    array, holes = _joined(given, lengths)
    ends = () if name == SURE else tuple(bounds)
    return Measured(array, holes, tuple(lengths), probe.count, probe.computed, ends)


def name_of(rule: str) -> str:
    """What a rule is called, without its arguments."""
    return rule.partition("(")[0].strip()


def open_holes(text: Any) -> int:
    """How many holes of a text do not say how long they are."""
    found = OPEN.findall(text) if isinstance(text, str) else []
    return sum(not piece.isdigit() for piece in found)


def _range(piece: str) -> tuple[int, int]:
    """The shortest and the longest that a hole may be."""
    low, dots, high = piece.partition("..")
    if piece == "*":
        return 1, MOST
    if not dots:
        return int(piece), int(piece)
    if not 1 <= int(low) <= int(high):
        raise PromptError(f"a hole of [[{piece}]] tokens: write the shortest length first, from 1")
    return int(low), int(high)


def _joined(given: Sequence[list[int]], lengths: Sequence[int]) -> tuple[IntArray, BoolArray]:
    parts = [np.asarray(given[0], np.int64)]
    for length, ids in zip(lengths, given[1:], strict=True):
        parts += [np.full(length, -1), np.asarray(ids, np.int64)]
    array = np.concatenate(parts)
    return np.maximum(array, 0), array == -1


class _Probe:
    """Forwards of texts that differ in the length of a hole."""

    def __init__(
        self, model: DiffusionModel, before: IntArray, given: Sequence[list[int]],
        before_forward: Callable[[], None],
    ) -> None:  # fmt: skip
        sampler = samplers.compose("fixed+whole", stop_ids=model.facts.stop_token_ids)
        self.recipe = MaskedRecipe(sampler, ban_stops=True)
        self.options = RowOptions.of(self.recipe, model)
        self.forward = Forward(model, caches.compose("none"))
        self.before, self.given = before, given
        self.go_on = before_forward
        self.count = self.computed = 0
        self._known: dict[tuple[int, ...], float] = {}

    def best(self, lengths: Sequence[int], which: int, candidates: Sequence[int]) -> int:
        """The candidate for hole number ``which`` that suits best, the shortest of equals."""
        texts = [(*lengths[:which], n, *lengths[which + 1 :]) for n in candidates]
        self._measure([text for text in texts if text not in self._known], which)
        return candidates[int(np.argmax([self._known[text] for text in texts]))]

    def _measure(self, texts: Sequence[tuple[int, ...]], which: int) -> None:
        """How sure the model is of a hole in each text: one packed forward, cut if too large."""
        jobs = [self._job(text, which) for text in texts]
        most = CPU_BATCH if self.forward.model.device.type == "cpu" else BATCH
        self.count += bool(jobs)
        while jobs:
            self.go_on()
            size = np.cumsum([job.size for job in jobs])
            count = max(1, int(np.searchsorted(size, most, "right")))
            for text, answer in zip(texts, self.forward.launch(jobs[:count]).wait(), strict=False):
                if isinstance(answer, Exception):
                    raise answer
                prediction, _ = answer
                self._known[text] = float(np.exp(prediction.logprob).mean())
            self.computed += int(size[count - 1])
            jobs, texts = jobs[count:], texts[count:]

    def _job(self, lengths: tuple[int, ...], which: int) -> Job:
        ids, holes = _joined(self.given, lengths)
        mask = self.forward.model.facts.mask_token_id
        assert mask is not None, "options were made"
        tokens = np.concatenate([self.before, ids])
        masked = np.concatenate([np.zeros(len(self.before), np.bool_), holes])
        canvas = Canvas.for_infill(
            tokens, masked, len(self.before), mask_id=mask, pad_id=mask,
            noise=lambda stream, step, at: uniform(0, stream, at, step, 0),
        )  # fmt: skip
        first = int(np.flatnonzero(masked)[sum(lengths[:which])])
        row = Row(canvas, self.recipe, self.options, Slots.empty(len(tokens)), canvas)
        return Job(row, canvas, full_plan(canvas), first + np.arange(lengths[which]))
