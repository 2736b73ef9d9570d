"""Texts and where their n-grams occurred: what followed a suffix before."""

from collections.abc import Sequence

import numpy as np

from ...core.canvas import IntArray

BORDER = -1  # stands between texts: nothing follows across it
MOST = 512  # occurrences of one n-gram that are looked at, the latest


class History:
    """Token ids in one array, with the places behind every token and every pair of tokens.

    Appending a token takes constant time.  What lies before ``low`` is forgotten.
    """

    def __init__(self) -> None:
        self._tokens = np.full(1024, BORDER, np.int64)
        self.size, self.low = 0, 0
        self._behind: dict[tuple[int, ...], list[int]] = {}  # 1- and 2-grams -> places

    @property
    def tokens(self) -> IntArray:
        return self._tokens[: self.size]

    def extend(self, tokens: Sequence[int]) -> None:
        while self.size + len(tokens) >= len(self._tokens):  # a border stays behind the end
            self._tokens = np.concatenate([self._tokens, np.full_like(self._tokens, BORDER)])
        last = int(self._tokens[self.size - 1]) if self.size else BORDER
        for token in tokens:
            self._tokens[self.size] = token
            self.size += 1
            if token != BORDER:
                self._behind.setdefault((token,), []).append(self.size)
                if last != BORDER:
                    self._behind.setdefault((last, token), []).append(self.size)
            last = token

    def matches(self, context: Sequence[int], longest: int) -> list[tuple[int, IntArray]]:
        """(n, places behind the last n tokens of ``context``), n up to ``longest``, ascending.

        Of several n with the same places only the largest is there.
        """
        result: list[tuple[int, IntArray]] = []
        places = self._places(context[-1:])
        if places.size:
            result.append((1, places))
        if len(context) < 2 or longest < 2:
            return result
        places = self._places(context[-2:])
        n = 2
        while places.size:
            if result and len(result[-1][1]) == len(places):
                result.pop()
            result.append((n, places))
            n += 1
            if n > min(longest, len(context)):
                break
            places = places[places - n >= self.low]
            places = places[self._tokens[places - n] == context[-n]]
        return result

    def _places(self, gram: Sequence[int]) -> IntArray:
        """Where an n-gram ended, if something follows there."""
        places = np.array(self._behind.get(tuple(gram), ())[-MOST - 1 :], np.int64)
        return places[(places < self.size) & (places - len(gram) >= self.low)]

    def following(self, places: IntArray) -> IntArray:
        """The tokens at ``places``; `BORDER` at the end of a text."""
        return self._tokens[np.minimum(places, self.size)]

    def forget(self, low: int) -> None:
        """What lies before ``low`` is no longer there; memory is given back now and then."""
        self.low = low
        if low > self.size // 2 and low > 4096:
            kept = self.tokens[low:].tolist()
            self._tokens[:] = BORDER
            self._behind.clear()
            self.size = self.low = 0
            self.extend(kept)
