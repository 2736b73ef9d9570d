"""Length controllers: how many tokens to draft."""

import copy
from dataclasses import dataclass

from ...core.errors import ConfigError
from ...core.registry import Registry
from ..base import Budget, DraftPart, Feedback, RoundStats


@dataclass
class LengthController(DraftPart):
    """Grants budgets on one sequence; `fresh` makes the copy that a sequence works with."""

    def fresh(self) -> "LengthController":
        """A controller in its initial state.  What is learnt about drafter and machine is shared
        by overriding this; what is learnt about a text never is."""
        return copy.deepcopy(self)

    def next(self, room: int, context: int) -> Budget:
        """The budget of the next round; ``room`` tokens fit, ``context`` are committed."""
        raise NotImplementedError

    def update(self, stats: RoundStats, feedback: Feedback) -> None:
        """What became of it."""


CONTROLLERS: Registry[LengthController] = Registry("length controller")
register = CONTROLLERS.register


def at_least(least: int | float, **values: float) -> None:
    for name, value in values.items():
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, not {value}")
