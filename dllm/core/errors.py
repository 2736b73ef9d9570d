"""What goes wrong, as types.  Every message says what was given, what was expected, what to do."""

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, requires
from numbers import Integral
from typing import Any

LONGEST_NAME = 100  # characters of an unknown name that are quoted


class DllmError(Exception):
    """Base of all this library raises on purpose.  ``field``: the argument to blame, if any."""

    field: str | None = None


class UnknownNameError(DllmError, ValueError):
    """A sampler, cache, model family, argument or option that does not exist."""

    def __init__(
        self, kind: str, name: object, known: Iterable[str], instead: str | None = None
    ) -> None:
        """``instead``: what to write in its place, where that is known."""
        # Whoever sends a name of megabytes gets no megabytes back, and no search through them.
        self.kind, self.name, self.known = kind, str(name)[:LONGEST_NAME], sorted(known)
        self.instead = instead
        if instead is not None:
            super().__init__(f"unknown {kind} {self.name!r}; here it is {instead}")
            return
        near = get_close_matches(self.name, self.known, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "known: "
        listing = "" if near else ", ".join(self.known) + "."
        super().__init__(f"unknown {kind} {self.name!r}; {hint}{listing}")

    def __reduce__(self) -> tuple[Any, ...]:  # an error that a worker process hands over
        return type(self), (self.kind, self.name, self.known, self.instead), vars(self)


class ConfigError(DllmError, ValueError):
    """A value out of range, or parts that cannot work together."""


class PromptError(DllmError, ValueError):
    """A prompt that cannot be decoded: empty, too long, of the wrong type."""


class CheckpointError(DllmError, RuntimeError):
    """A checkpoint that cannot be loaded safely and completely."""


class NumericError(DllmError, RuntimeError):
    """Probabilities that are not finite: broken weights, or a dtype too narrow for them."""


NOT_FINITE = (
    "the weights hold NaN or infinite values, or overflow in this dtype; `dllm doctor` checks "
    "them, dtype='float32' may help"
)


class QueueFullError(DllmError, RuntimeError):
    """As many requests wait as may wait: try again later."""


class CancelledError(DllmError, RuntimeError):
    """The request was cancelled before it had a result."""


class DeadlineError(DllmError, TimeoutError):
    """The request was not answered by its deadline."""


class OutOfMemoryError(DllmError, RuntimeError):
    """The device ran out of memory during a step; the model stays usable."""


# How the optional dependencies of an extra are installed.  The package is not on an index yet, and
# the name there is free for anybody to take: the command works in a checkout of the repository.
INSTALL_EXTRA = "pip install -c constraints.txt '.[{extra}]' in a checkout of dllm"


def missing(what: str, extra: str, otherwise: str = "") -> ConfigError:
    """The error for an optional dependency that is not installed.

    ``what`` names it; ``otherwise``: what to do without it, e.g. ", or pass --no-plot".
    """
    return ConfigError(f"{what} is missing: {INSTALL_EXTRA.format(extra=extra)}{otherwise}")


def extras() -> dict[str, list[str]]:
    """What each extra of this distribution brings; none in a checkout that is not installed."""
    found: dict[str, list[str]] = {}
    with suppress(PackageNotFoundError):
        for line in requires("dllm") or ():
            if match := re.match(r"(?!dllm\b)([\w.-]+).*;.*extra == ['\"](\w+)['\"]", line):
                found.setdefault(match[2], []).append(match[1])
    return found


def missing_module(error: ModuleNotFoundError) -> ConfigError | None:
    """`missing` for a module that an extra of the installed package brings; None for others."""
    name = (error.name or "").partition(".")[0].replace("_", "-")
    for extra, brought in extras().items():
        if name in [one.replace("_", "-") for one in brought]:
            return missing(name, extra)
    return None


def check_unicode(text: str, what: str = "the prompt") -> None:
    """Raise `PromptError` for text with half of a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{what} is not valid Unicode: {error.reason}") from None


def check_switch(name: str, value: object) -> None:
    """Raise `ConfigError` for anything but True and False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is True or False, not {short(value)}")


def check_whole(name: str, value: Any, most: float = math.inf) -> None:
    """Raise `ConfigError` for anything but a whole number from 1, also one of numpy."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not 1 <= int(value) <= most:
        upto = "" if most == math.inf else f" to {most}"
        raise ConfigError(f"{name} is a whole number from 1{upto}, not {short(value)}")


def short(value: object) -> str:
    """``value`` as it is written, cut where it is long."""
    try:
        text = " ".join(repr(value).split("\n"))
    except Exception:  # a number of thousands of digits, or an object that fails at it
        text = f"such a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def message_of(error: BaseException) -> str:
    """The message of an error; "" of a foreign one that fails at that, too."""
    try:
        return str(error)
    except Exception:
        return ""


FAILURES = Exception, SystemExit  # of foreign code, which ends what it is asked for, no program


def failure(error: BaseException) -> Exception:
    """The error of a request whose own code raised."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__} was raised: {one_line(error)}")


def one_line(error: BaseException, most: int = 300) -> str:
    """The message of a foreign error as one line of at most ``most`` characters."""
    text = " ".join(message_of(error).split()) or type(error).__name__
    return text if len(text) <= most else text[: most - 3] + "..."
