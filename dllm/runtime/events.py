"""What happened to a text in one step, as its readers see it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from ..core.canvas import Canvas, Edit, IntArray, moved
from ..core.config import GenerationConfig
from ..core.text import GrowingText, stop_floor
from ..engine.recipe import Recipe
from ..engine.work import Step
from ..models import DiffusionModel
from ..request.request import Request
from ..samplers.eos import stops
from .result import Result
from .trace import Cell, canvas_html

Progress = list[tuple[Request, Step | None]]  # None: finished without a step of its own
MASK = "░"  # an undecided position for which nothing is proposed, in `Event.draft`


@dataclass(frozen=True, eq=False)
class Event:
    """One step of one row, as it happens.

    ``committed`` and ``drafts`` map positions to token ids: decided in this step, proposed but
    still open; ``remasked`` positions were taken back.  ``window``: [low, high), where the step
    might commit.  ``text``: what has become final since the last event of the row: it is never
    taken back, and all pieces together are ``result.text``; ``tokens`` are the ids behind it.
    ``accepted`` of the committed tokens a drafter had proposed.  ``edits``: changes of the row's
    length that the step ended with, in turn; all positions are those after them.  ``canvas`` is the
    live row (read only).  ``result`` is set on the row's last event.
    """

    row: int
    step: int
    committed: dict[int, int]
    drafts: dict[int, int]
    remasked: list[int]
    canvas: Canvas
    result: Result | None = None
    text: str = ""
    window: tuple[int, int] = (0, 0)
    tokens: list[int] = field(default_factory=list, repr=False)
    accepted: int = 0
    edits: tuple[Edit, ...] = ()
    tail: list[int] = field(default_factory=list, repr=False)  # ids behind ``draft``, -1: a mask
    decode: Callable[[Sequence[int]], str] | None = field(default=None, repr=False)

    @cached_property
    def draft(self) -> str:
        """The text behind what is final, as far as the window reaches: what is decided or proposed
        there, with a ░ for each position that is neither."""
        if self.decode is None:
            return ""
        text, run = "", list[int]()
        for token in [*self.tail, -1]:
            if token >= 0:
                run.append(token)
                continue
            text += (self.decode(run) if run else "") + MASK
            run = []
        return text[: -len(MASK)]

    def _repr_html_(self) -> str:
        """The canvas in a notebook as it stands after the step: decided tokens, darker the later,
        drafts in italics, ░ for what is neither."""
        canvas, last = self.canvas, max(self.step, 1)
        cells = []
        for i in range(canvas.prompt_length, canvas.length):
            token = self.drafts.get(i, -1) if canvas.masked[i] else int(canvas.tokens[i])
            text = MASK if token < 0 else f"[{token}]"
            if token >= 0 and self.decode is not None:
                text = self.decode([token]) or "∎"
            if canvas.masked[i]:
                cells.append(Cell(text, None, "undecided", draft=token >= 0))
            elif canvas.commit_step[i] < 0:
                cells.append(Cell(text))
            else:
                step = int(canvas.commit_step[i])
                cells.append(Cell(text, min(1.0, step / last), f"step {step + 1}"))
        return canvas_html(cells, f"step {self.step + 1} · forwards {canvas.nfe}")

    def merged(self, newer: Self) -> Self:
        """This event and the one after it as one: nothing that was committed is lost."""
        committed = _moved(self.committed, newer.edits)
        taken_back = _moved(dict.fromkeys(self.remasked, 0), newer.edits)
        committed = {i: t for i, t in committed.items() if i not in newer.remasked}
        remasked = sorted({*taken_back, *newer.remasked} - newer.committed.keys())
        return replace(
            newer, committed=committed | newer.committed, remasked=remasked,
            tokens=self.tokens + newer.tokens, accepted=self.accepted + newer.accepted,
            edits=self.edits + newer.edits,
        )  # fmt: skip


class Reader:
    """Adds the text to the events of one request, in their order."""

    def __init__(self, model: DiffusionModel, config: GenerationConfig) -> None:
        tokenizer = model.tokenizer
        self.decode: Callable[[Sequence[int]], str] | None = None
        if tokenizer is not None:
            self.decode = lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))
        self._config = config
        self._text: GrowingText | None = None

    def read(self, event: Event) -> Event:
        if self.decode is None:
            return event
        if self._text is None:
            floor = stop_floor(event.canvas, self._config) - event.canvas.prompt_length
            self._text = GrowingText(self.decode, self._config.stop_strings, floor)
        text = self._text.feed(event.tokens)
        if event.result is not None:
            text += self._text.end(event.result.text)
        return replace(event, text=text, decode=self.decode)


def events(progress: Progress) -> Iterator[tuple[Request, Event]]:
    """An event, still without its text, per request that a step changed and that has not failed."""
    for request, step in progress:
        if request.canvas is not None and request.error is None:
            yield request, _event(request, request.canvas, step)


def _event(request: Request, canvas: Canvas, step: Step | None) -> Event:
    committed: dict[int, int] = {}
    drafts: dict[int, int] = {}
    remasked: list[int] = []
    edits: tuple[Edit, ...] = ()
    if step is not None:
        d = step.decision
        remasked, edits, drafts = d.remasked.tolist(), d.edits, step.proposals
        committed = dict(zip(d.committed.tolist(), d.tokens.tolist(), strict=True))
        if edits:  # positions as they are now
            drafts, committed = _moved(drafts, edits), _moved(committed, edits)
            remasked = list(_moved(dict.fromkeys(remasked, 0), edits))
        drafts = {i: t for i, t in drafts.items() if canvas.masked[i]}
    window, number = canvas.window, max(0, canvas.step - 1)
    if step is not None:  # the next one may be under way
        window, number = step.window, step.number
    first = canvas.prompt_length if request.frontier < 0 else request.frontier
    frontier = max(first, final_end(canvas, window, request.recipe))
    request.frontier = frontier
    high = min(max(window[1], frontier), canvas.length)
    tail = [
        drafts.get(i, -1) if masked else token
        for i, token, masked in zip(
            range(frontier, high), canvas.tokens[frontier:high].tolist(),
            canvas.masked[frontier:high].tolist(), strict=True,
        )
    ]  # fmt: skip
    return Event(
        row=request.index, step=number, drafts=drafts, remasked=remasked, canvas=canvas,
        committed={i: t for i, t in committed.items() if i not in remasked},
        result=request.result, window=window, tokens=canvas.tokens[first:frontier].tolist(),
        accepted=0 if step is None else step.accepted,
        tail=[] if request.result is not None else tail, edits=edits,
    )  # fmt: skip


def _moved(tokens: dict[int, int], edits: Sequence[Edit]) -> dict[int, int]:
    """Tokens by the positions that they have after some edits."""
    places = {i: moved(i, edits) for i in tokens}
    return {at: tokens[i] for i, at in places.items() if at is not None}


def final_end(canvas: Canvas, window: tuple[int, int], recipe: Recipe) -> int:
    """One past the last position whose text can never change: what is decided from the beginning
    on without a gap, and, where the recipe revises decisions, lies before the ``window``."""
    low, end = canvas.prompt_length, canvas.length
    undecided: IntArray = canvas.masked[low:end].nonzero()[0]
    frontier = low + int(undecided[0]) if undecided.size else end
    if recipe.revises and not canvas.finished:
        frontier = min(frontier, max(low, window[0]))
    where = stops(canvas, low, frontier, recipe.stop_ids)
    return int(where[0]) + 1 if where.size else frontier
