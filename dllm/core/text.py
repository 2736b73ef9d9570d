"""Text that only grows: from token ids that have become final to pieces that stay."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .canvas import Canvas
from .config import GenerationConfig

Decode = Callable[[Sequence[int]], str]
LONGEST_FORM = 4096  # characters of the form of a hole
BEGIN = re.compile(r"\[\[(\*|\d+\.\.\d+|\d+)(:?)")
END = re.compile(r"\]\](?!\])|\n")
UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no character yet


class Hole(NamedTuple):
    """``[[8]]``, ``[[8:[a-z]+]]``, ``[[*]]`` or ``[[2..9]]``, from ``first`` to before ``behind``;
    ``form``: "" for a hole without."""

    first: int
    behind: int
    size: str
    form: str

    @property
    def plain(self) -> bool:
        """Whether it says how long it is."""
        return self.size.isdigit()


def holes_in(text: Any) -> Iterator[Hole]:
    """The holes of a text, in time linear in its length; of what is no text none."""
    if not isinstance(text, str):
        return
    ends, behind = [found.start() for found in END.finditer(text)], 0
    for begin in BEGIN.finditer(text):
        (size, formed), end = begin.groups(), begin.end()
        if formed:
            at = bisect_left(ends, end + (text[end : end + 1] != "\n"))
            end = ends[at] if at < len(ends) else len(text)
        whole = text.startswith("]]", end) and not (
            size.isdigit() and text.startswith("]", end + 2)
        )
        if begin.start() >= behind and whole and end - begin.end() <= LONGEST_FORM:
            behind = end + 2
            yield Hole(begin.start(), behind, size, text[begin.end() : end])


def hole_forms(text: Any) -> list[str | None]:
    """The form of each hole of a text that has positions: ``[[8:[a-z]+]]`` is one of 8 tokens whose
    text matches ``[a-z]+``; None for a hole without."""
    holes = [hole for hole in holes_in(text) if not hole.plain or int(hole.size[:9])]
    return [hole.form or None for hole in holes]


class GrowingText:
    """Pieces of a text as its tokens become final.

    ``decode``: ids to text.  A character whose bytes are not all there is held back, and so is
    what may be the beginning of one of the ``stops``; behind the first of these nothing follows.
    The text does not end within its first ``floor`` tokens.
    """

    def __init__(self, decode: Decode, stops: tuple[str, ...] = (), floor: int = 0) -> None:
        self._decode, self._stops, self._floor = decode, stops, floor
        self._ids: list[int] = []
        self._shown = ""

    def feed(self, ids: Sequence[int]) -> str:
        """What ``ids``, the next final ones, add to the text."""
        self._ids += ids
        text = self._decode(self._ids).rstrip(UNFINISHED)
        floor = len(self._decode(self._ids[: self._floor])) if self._stops and self._floor else 0
        text = text[: len(text) - held_back(text, self._stops, floor)]
        # Some tokenizers rewrite what stands before, e.g. blanks: then the text waits.
        if not ids or not text.startswith(self._shown):
            return ""
        piece, self._shown = text[len(self._shown) :], text
        return piece

    def end(self, text: str) -> str:
        """The rest, once the whole ``text`` is known: what it has behind what was shown of it."""
        while not text.startswith(self._shown):  # bytes turned out to be no characters
            self._shown = self._shown[:-1]
        return text[len(self._shown) :]


def stop_at(text: str, stops: Sequence[str], floor: int = 0) -> int | None:
    """Where the first of the ``stops`` begins that ends behind the first ``floor`` characters."""
    starts = (text.find(stop, max(0, floor - len(stop) + 1)) for stop in stops)
    return min((at for at in starts if at >= 0), default=None)


def stop_floor(canvas: Canvas, config: GenerationConfig) -> int:
    """The position before which no stop string ends the text, because something is given there or
    within ``min_new_tokens``; of a text with holes, where the last one begins."""
    if canvas.holes:
        return canvas.holes[-1].low
    return max(canvas.text_floor, canvas.start + config.min_new_tokens)


def held_back(text: str, stops: Sequence[str], floor: int = 0) -> int:
    """Characters at the end that a stop string takes away or may take away."""
    start = stop_at(text, stops, floor)
    if start is not None:
        return len(text) - start
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
