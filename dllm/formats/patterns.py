"""What users write, as one regular expression."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import ConfigError, one_line, short

# Classes of characters are those of ASCII, as with Python's `re.ASCII`.
ASCII = {
    "d": "[0-9]", "D": "[^0-9]",
    "w": "[A-Za-z0-9_]", "W": "[^A-Za-z0-9_]",
    "s": r"[ \t\n\r\f\v]", "S": r"[^ \t\n\r\f\v]",
}  # fmt: skip
ESCAPE = re.compile(r"\\(.)", re.DOTALL)
PROPERTY = re.compile(r"\\[pP](?:\{[^}]*\}|\w)")  # of Unicode, which Python's own module lacks
BEYOND = re.compile(r"\(\?(?:[=!]|<[=!]|P=|\()|\\[bBAZ1-9]")


def regex_pattern(regex: str) -> str:
    r"""A regular expression of the user, of which a text has to match the whole.

    ``\d``, ``\w`` and ``\s`` are those of ASCII.  Raises `ConfigError` for one that is not well
    formed, and for what no automaton has: look-around, back references, word boundaries.
    """
    try:
        re.compile(PROPERTY.sub(".", regex), re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"regex {short(regex)} is not well formed: {one_line(error)}") from None
    beyond = BEYOND.search(ESCAPE.sub(lambda m: m[0] if BEYOND.match(m[0]) else "x", regex))
    if beyond:
        raise ConfigError(
            f"regex {short(regex)} has {beyond[0]!r}: look-around, back references and boundaries "
            "are not available in a format; the whole text is matched as it is"
        )
    return ESCAPE.sub(lambda m: ASCII.get(m[1], m[0]), regex)


def choice_pattern(choices: Sequence[str]) -> str:
    """One of several texts."""
    return "|".join(map(literal, choices))


def literal(text: str) -> str:
    """A text as an expression that matches just it."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~/])", r"\\\1", text)
