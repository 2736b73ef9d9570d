"""A fixed number of commits per step, in any window."""

from __future__ import annotations

from dataclasses import dataclass

from ..canvas import BoolArray
from ..capabilities import REPEATABLE
from ..errors import ConfigError
from .base import Selector, View, top
from .compose import register


@register("fixed", paper="Large Language Diffusion Models", arxiv="2502.09992")
@dataclass(frozen=True)
class Fixed(Selector):
    """Commit the ``n`` (1) most confident positions in every step.

    Unlike the quota of ``llada`` it keeps no schedule, so it suits windows that slide.
    """

    offers = frozenset({REPEATABLE})

    n: int = 1

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"n must be at least 1, not {self.n}")

    def select(self, view: View) -> BoolArray:
        return top(view.score, self.n)
