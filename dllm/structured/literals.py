"""Text that a form leaves no choice about: the names and punctuation of a JSON object, a date's
hyphens.  It can be written without asking the model (S3, arXiv 2507.04504)."""

from collections.abc import Sequence

import numpy as np

from ..core.canvas import IntArray
from .automaton import Automaton

MOST = 256  # tokens that may stand somewhere, of a place that is looked at


class Literals:
    """For each state the longest token all of whose text has to follow there.

    A text has many spellings in tokens, of which this takes one, whatever the model prefers.
    """

    def __init__(self, automaton: Automaton, pieces: Sequence[bytes | None]) -> None:
        self.automaton, self.pieces = automaton, pieces
        self._found: dict[int, int | None] = {}
        self._tokens: dict[int, IntArray] = {}
        order = np.argsort(automaton.of, kind="stable")
        starts = np.searchsorted(automaton.of[order], np.arange(automaton.next.shape[1] + 1))
        self._members, self._starts = order, starts

    def token(self, state: int) -> int | None:
        """The token, None where there is none."""
        if state not in self._found:
            spelt = {int(t): self.pieces[t] or b"" for t in self._allowed(state)}
            longest = sorted(spelt, key=lambda t: (-len(spelt[t]), t))
            fits = (t for t in longest if self._begins(state, spelt[t]))
            self._found[state] = next(fits, None)
        return self._found[state]

    def run(self, state: int, most: int) -> tuple[list[int], int]:
        """At most so many tokens that follow one another from a state on, and the state behind."""
        tokens: list[int] = []
        while len(tokens) < most and (token := self.token(state)) is not None:
            tokens.append(token)
            state = int(self.automaton.next[state, self.automaton.of[token]])
        return tokens, state

    def _allowed(self, state: int) -> IntArray:
        """The tokens that may stand in a state; none where they are many, or the text may end."""
        automaton = self.automaton
        if state not in self._tokens:
            classes, _ = automaton.ways(state)
            ends = automaton.accepting[state] or automaton.closed[state]
            many = (self._starts[classes + 1] - self._starts[classes]).sum() > MOST
            ranges = [] if ends or many else classes.tolist()
            self._tokens[state] = np.concatenate([
                np.zeros(0, np.int64),
                *(self._members[self._starts[c] : self._starts[c + 1]] for c in ranges),
            ])  # fmt: skip
        return self._tokens[state]

    def _begins(self, state: int, text: bytes) -> bool:
        """Whether all that may be written from a state on begins with ``text``."""
        tokens = self._allowed(state)
        for token in tokens.tolist():
            piece = self.pieces[token] or b""
            if piece.startswith(text):
                continue
            follow = int(self.automaton.next[state, self.automaton.of[token]])
            if not text.startswith(piece) or not self._begins(follow, text[len(piece) :]):
                return False
        return bool(tokens.size)
