"""A canvas as spans of text: what a live view draws, without the drawing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from ..runtime.spelling import Spelling
from .output import CONTROLS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..core.canvas import Canvas
    from ..runtime.events import Event

COMMITTED, FRESH, DRAFT, MASK, REST = "committed", "fresh", "draft", "mask", "rest"
AHEAD = 8  # masks shown beyond the open window
BLOCK, END = "░", "∎"


class Span(NamedTuple):
    """Neighbouring positions of one kind and their text."""

    kind: str
    text: str


@dataclass(frozen=True)
class Frame:
    """One row after one step.  ``decided`` of ``total`` positions are; both shrink at a stop."""

    row: int
    step: int
    nfe: int
    decided: int
    total: int
    spans: tuple[Span, ...]
    finished: bool


class Speller:
    """Text of token ids in the middle of a text, as a terminal may show it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        self.spelling, self.stop_ids = Spelling(tokenizer), frozenset(stop_ids)

    def __call__(self, ids: Sequence[int], first: bool = False) -> str:
        """Text of ``ids``; every run of stop ids is one end sign.  ``first``: a text begins."""
        parts: list[str] = []
        for stop, run in groupby(ids, key=self.stop_ids.__contains__):
            if stop:
                parts.append(END)
            elif first and not parts:
                parts.append(self.spelling.decode([*run], special=True))
            else:
                parts.append(self.spelling.middle(tuple(run)))
        return "".join(parts).translate(CONTROLS)


def frame(event: Event, speller: Speller) -> Frame:
    """What ``event`` leaves on its row."""
    canvas = event.canvas
    region = canvas.masked[canvas.start : canvas.end]
    return Frame(
        row=event.row, step=event.step, nfe=canvas.nfe, decided=int((~region).sum()),
        total=len(region), spans=tuple(_spans(event, speller)), finished=event.result is not None,
    )  # fmt: skip


def _spans(event: Event, speller: Speller) -> Iterator[Span]:
    canvas = event.canvas
    limit = _limit(canvas)
    for kind, run in groupby(range(canvas.start, limit), key=lambda i: _kind(event, i)):
        positions = list(run)
        ids = [event.drafts[i] if kind == DRAFT else int(canvas.tokens[i]) for i in positions]
        first = positions[0] == canvas.start
        yield Span(kind, BLOCK * len(ids) if kind == MASK else speller(ids, first))
    if limit < canvas.end:
        yield Span(REST, f" +{canvas.end - limit}")


def _limit(canvas: Canvas) -> int:
    """Where the view ends: all that is decided, the open window, and a few masks."""
    decided = (~canvas.masked[canvas.start : canvas.end]).nonzero()[0]
    last = canvas.start + int(decided[-1]) + 1 if decided.size else canvas.start
    limit = min(canvas.end, max(last, canvas.window[1]) + AHEAD)
    return limit if canvas.masked[canvas.start : canvas.end].any() else canvas.end


def _kind(event: Event, position: int) -> str:
    if event.canvas.masked[position]:  # also what was committed and taken back in this step
        return DRAFT if position in event.drafts else MASK
    return FRESH if position in event.committed else COMMITTED
