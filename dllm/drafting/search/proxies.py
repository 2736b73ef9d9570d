"""Causal proxies: cheap left-to-right language models that help a search put marginals in order.

A proxy scores the next token given the committed text and the path so far; natural logarithms
throughout.  It can only change which draft is proposed, never the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...registry import Registry
from ..base import DraftPart


@dataclass
class Proxy(DraftPart):
    """Scores continuations.  States are immutable; ``learn`` may be called between rounds."""

    def start(self, prefix: Sequence[int]) -> Any:
        """The state after the committed tokens."""
        raise NotImplementedError

    def logprobs(self, state: Any, tokens: Sequence[int]) -> list[float]:
        """Conditional log-probability of each of ``tokens`` as the next one."""
        raise NotImplementedError

    def advance(self, state: Any, token: int) -> Any:
        """The state after one more token."""
        raise NotImplementedError

    def learn(self, tokens: Sequence[int], fresh: int) -> None:
        """The last ``fresh`` of ``tokens`` are new text of the verifier (or of the prompt)."""


PROXIES: Registry[Proxy] = Registry("proxy")
register = PROXIES.register


@register("uniform")
@dataclass
class Uniform(Proxy):
    """No opinion."""

    def start(self, prefix: Sequence[int]) -> Any:
        return None

    def logprobs(self, state: Any, tokens: Sequence[int]) -> list[float]:
        return [0.0] * len(tokens)

    def advance(self, state: Any, token: int) -> Any:
        return None
