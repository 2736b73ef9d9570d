"""What values the arguments of a part may take."""

import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from .errors import ConfigError, UnknownNameError

Limit = Callable[[str, Any], None]  # (name, value); raises where the value is not allowed
Limits = Mapping[str, Limit]  # argument -> its limit


def bounds(**limits: Limit) -> Limits:
    """The limits of a part's arguments, by their names."""
    return MappingProxyType(limits)


def limit(fits: Callable[[Any], bool], said: str) -> Limit:
    """A limit that refuses what does not fit, with the sentence ``said`` of name and value."""

    def check(name: str, value: Any) -> None:
        if not fits(value):
            raise ConfigError(said.format(name=name, value=value))

    return check


def one_of(words: Iterable[str]) -> Limit:
    """One of several words."""

    def check(name: str, value: Any) -> None:
        if value not in words:
            raise UnknownNameError(name, value, words)

    return check


COUNT = limit(lambda n: n >= 1, "{name} must be at least 1, not {value}")
LANES = limit(lambda n: 1 <= n <= 256, "{name} must lie between 1 and 256, not {value}")
NOT_NEGATIVE = limit(lambda x: x >= 0, "{name} must not be negative, not {value}")
FINITE = limit(lambda x: 0 <= x < math.inf, "{name} must be finite and at least 0, not {value}")
POSITIVE = limit(lambda x: x > 0, "{name} must be positive, not {value}")
TEMPERATURE = limit(lambda x: 1e-6 <= x <= 1e6, "{name} must lie between 1e-6 and 1e6, not {value}")
SHARE = limit(lambda x: 0 <= x <= 1, "{name} must lie in [0, 1], not {value}")
SOME_SHARE = limit(lambda x: 0 < x <= 1, "{name} must lie in (0, 1], not {value}")
# Of probabilities that have to be reached.
THRESHOLD = limit(
    lambda x: 0 <= x <= 1 or x == math.inf,
    "{name}={value} is outside [0, 1]: choose one within, or inf, which nothing reaches",
)


def check_limits(part: Any) -> None:
    """Raise for an argument beyond its limit in ``limits`` of the part's class or of one that it
    inherits from; None, which leaves an argument open, is always allowed."""
    for cls in type(part).__mro__:
        for name, check in vars(cls).get("limits", {}).items():
            if (value := getattr(part, name)) is not None:
                check(name, value)
