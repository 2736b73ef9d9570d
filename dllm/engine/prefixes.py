"""Texts that are kept when they are complete, for others that begin like them.

The second turn of a chat, a shared system prompt, a long file asked about twice: the keys and
values of the tokens that a new prompt has in common with a kept text are copied, not computed.
Exact match only; where nothing that follows a token changes its keys and values, they are the ones
that would be computed: of a causal network, and of the blocks of a block-causal one.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from ..core.canvas import IntArray
from ..kernels.linear import known_by
from .memory import unless_out_of_memory

KEPT = 16_384  # tokens that a session keeps
LEAST = 16  # tokens in common below which copying is not worth its while
LOG = logging.getLogger(__name__)
T = TypeVar("T")


@contextmanager
def failures_are_logged() -> Iterator[None]:
    """For what keeps a finished text: its answer is there, and nobody else's depends on it."""
    try:
        yield
    except Exception:
        LOG.warning("a finished text could not be kept for others", exc_info=True)


@dataclass(eq=False)
class _Kept(Generic[T]):
    text: T
    tokens: IntArray  # those whose keys and values are held
    weights: object


@dataclass
class Prefixes(Generic[T]):
    """Complete texts of at most ``budget`` tokens together (0: keep none); the one whose last use
    is longest ago goes first.  ``release`` gives back what a text holds.  ``hits`` texts began with
    ``reused`` tokens of others."""

    release: Callable[[T], None]
    budget: int = 0
    kept: list[_Kept[T]] = field(default_factory=list)
    hits: int = 0
    reused: int = 0

    @property
    def held(self) -> int:
        return sum(len(one.tokens) for one in self.kept)

    def allow(self, tokens: int | None) -> None:
        """Set the budget; None: `KEPT`."""
        self.budget = KEPT if tokens is None else tokens
        self.shrink(self.budget)

    def find(
        self, prompt: IntArray, weights: object, *, whole: bool = False, block: int = 1
    ) -> tuple[T, int] | None:
        """The kept text with most tokens in common with ``prompt`` (P,), and how many, at most
        P - 1, in whole blocks; with ``whole`` only texts that the prompt begins with."""
        best, most = None, LEAST - 1
        for one in self.kept:
            n = min(len(one.tokens), len(prompt) - 1)
            if one.weights != weights or n <= most:
                continue
            different = np.flatnonzero(one.tokens[:n] != prompt[:n])
            n = (int(different[0]) if different.size else n) // block * block
            if n > most and not (whole and n < len(one.tokens)):
                best, most = one, n
        if best is None:
            return None
        self.kept.remove(best)  # is now the last one used
        self.kept.append(best)
        self.hits += 1
        self.reused += most
        return best.text, most

    def keep(self, text: T, tokens: IntArray, weights: object) -> bool:
        """Keep a complete text; False when it is not, and still the caller's.  Texts that it begins
        with go."""
        if not LEAST <= len(tokens) <= self.budget:
            return False
        for one in list(self.kept):
            same = one.weights == weights and len(one.tokens) <= len(tokens)
            if same and np.array_equal(one.tokens, tokens[: len(one.tokens)]):
                self._drop(one)
        self.shrink(self.budget - len(tokens))
        self.kept.append(_Kept(text, tokens, weights))
        return True

    def shrink(self, tokens: int) -> None:
        """Let texts go until at most ``tokens`` are held."""
        while self.kept and self.held > max(0, tokens):
            self._drop(self.kept[0])

    def make_room(self, take: Callable[[], int | None]) -> int | None:
        """What ``take`` gets; while it gets nothing or memory does not suffice for it, texts go."""
        while self.kept:
            if (taken := unless_out_of_memory(take)) is not None:
                return taken
            self._drop(self.kept[0])
        return take()

    def _drop(self, one: _Kept[T]) -> None:
        self.kept.remove(one)
        self.release(one.text)


def weights_of(hf: Any, salt: str | None = None) -> object:
    """What tells the weights of a network apart from those it has at another time: which adapters
    are active, and how often its parameters were changed in place.  ``salt``: of those who share
    kept texts; others do not learn from a hit what somebody asked."""
    adapters = []
    for module in hf.modules():
        active = getattr(module, "active_adapters", None)
        if active is not None and not callable(active):
            scaling = getattr(module, "scaling", {})
            scaling = tuple(scaling.items()) if isinstance(scaling, dict) else ()
            off = getattr(module, "disable_adapters", False), bool(getattr(module, "merged", False))
            adapters.append((tuple(active), off, scaling))
    return salt, tuple(adapters), hash(tuple(map(known_by, hf.parameters())))
