"""Text that only grows: from token ids that have become final to pieces that stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are no character yet


class GrowingText:
    """Pieces of a text as its tokens become final.

    ``decode``: ids to text.  A character whose bytes are not all there is held back, and so is
    what may be the beginning of one of the ``stops``; behind the first of these nothing follows.
    """

    def __init__(self, decode: Decode, stops: tuple[str, ...] = ()) -> None:
        self._decode, self._stops = decode, stops
        self._ids: list[int] = []
        self._shown = ""

    def feed(self, ids: Sequence[int]) -> str:
        """What ``ids``, the next final ones, add to the text."""
        self._ids += ids
        text = self._decode(self._ids).rstrip(UNFINISHED)
        text = text[: len(text) - _held_back(text, self._stops)]
        # Some tokenizers rewrite what stands before, e.g. blanks: then the text waits.
        if not ids or not text.startswith(self._shown):
            return ""
        piece, self._shown = text[len(self._shown) :], text
        return piece

    def end(self, text: str) -> str:
        """The rest, once the whole ``text`` is known."""
        piece = text[len(self._shown) :] if text.startswith(self._shown) else ""
        self._shown = text
        return piece


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Characters at the end that a stop string takes away or may take away."""
    starts = [at for stop in stops if (at := text.find(stop)) >= 0]
    if starts:
        return len(text) - min(starts)
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
