"""What followed the n-grams of a text."""

from collections.abc import Sequence
from itertools import islice

from ...core.canvas import IntArray


class Followers:
    """For every n-gram of a text, n among the ascending ``sizes``, the tokens that followed it and
    how often, the one that did last at the end."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.counts: dict[tuple[int, ...], dict[int, int]] = {}
        self.known = 0  # tokens that were counted

    def learn(self, text: IntArray) -> None:
        """Count what is new in ``text`` (n,), which begins as it did the last time."""
        start = max(0, self.known - self.sizes[-1])
        tokens = text[start:].tolist()
        for end in range(self.known - start, len(tokens)):
            for n in self.sizes:
                if n > end:
                    break
                seen = self.counts.setdefault(tuple(tokens[end - n : end]), {})
                seen[tokens[end]] = seen.pop(tokens[end], 0) + 1
        self.known = len(text)

    def latest(self, context: Sequence[int], most: int) -> dict[int, tuple[int, int]]:
        """At most ``most`` followers: token -> (n of the longest n-gram it followed, its place
        among those, the latest first)."""
        found: dict[int, tuple[int, int]] = {}
        for n in reversed(self.sizes):
            seen = self.counts.get(tuple(context[-n:]), {}) if n <= len(context) else {}
            for place, token in enumerate(islice(reversed(seen), most)):
                found.setdefault(token, (n, place))
        return dict(islice(found.items(), most))
