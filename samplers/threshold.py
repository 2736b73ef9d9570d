"""Fast-dLLM's parallel decoding: commit whatever is confident enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..canvas import BoolArray
from ..capabilities import PROBABILITY, REPEATABLE
from ..errors import ConfigError
from .base import Selector, View, top
from .compose import register

FAST_DLLM = "Fast-dLLM: Training-free Acceleration of Diffusion LLM"


def check_probability(name: str, value: float) -> None:
    """A probability threshold lies in [0, 1]; infinity means one token per step."""
    if not (0 <= value <= 1 or value == math.inf):
        raise ConfigError(
            f"{name}={value} is outside [0, 1]; use {name}=inf for one token per step"
        )


@register("threshold", paper=FAST_DLLM, arxiv="2505.22618")
@dataclass(frozen=True)
class Threshold(Selector):
    """Commit every position whose probability reaches ``tau``, and always the ``n`` best ones.

    ``tau`` in [0, 1], default 0.9; 0 commits the whole block in one step, ``inf`` ``n`` tokens
    (default 1) per step.
    """

    needs = frozenset({PROBABILITY})
    offers = frozenset({REPEATABLE})

    tau: float = 0.9
    n: int = 1

    def __post_init__(self) -> None:
        check_probability("tau", self.tau)
        if self.n < 1:
            raise ConfigError(f"n must be at least 1, not {self.n}")

    def select(self, view: View) -> BoolArray:
        sure: BoolArray = view.score >= self.tau
        return sure | top(view.score, self.n) if self.n > 1 else sure  # one is guaranteed anyway
