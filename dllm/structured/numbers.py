"""Expressions of the numbers within bounds, as JSON writes them."""

from __future__ import annotations

import math

from ..core.errors import ConfigError
from .patterns import either

FRACTION = r"(?:\.[0-9]+)?"


def integers(
    low: float | None, high: float | None, above: bool = False, below: bool = False
) -> str:
    """Whole numbers from ``low`` to ``high``, None being no bound; ``above``, ``below``: without
    the bound itself."""
    least = None if low is None else math.floor(low) + 1 if above else math.ceil(low)
    most = None if high is None else math.ceil(high) - 1 if below else math.floor(high)
    if least is not None and most is not None and least > most:
        raise ConfigError(f"no whole number lies between {low} and {high}")
    return either(_signed(least, most))


def _signed(least: int | None, most: int | None) -> list[str]:
    parts = []
    if most is None or most >= 0:
        parts.append(_natural(max(least or 0, 0), most))
    if least is None or least < 0:
        smallest = 1 if most is None or most >= 0 else -most
        parts.append(f"-{_natural(smallest, None if least is None else -least)}")
    return parts


def _natural(low: int, high: int | None) -> str:
    """Whole numbers from ``low`` >= 0 to ``high``."""
    if high is None:
        if low == 0:
            return "(?:0|[1-9][0-9]*)"
        size = len(str(low))
        return either([*_lengths(low, 10**size - 1), f"[1-9][0-9]{{{size},}}"])
    return either(_lengths(low, high))


def _lengths(low: int, high: int) -> list[str]:
    """One expression or more per number of digits."""
    parts: list[str] = []
    while low <= high:
        end = min(high, 10 ** len(str(low)) - 1)
        parts += _digits(str(low), str(end))
        low = end + 1
    return parts


def _digits(low: str, high: str) -> list[str]:
    """Numbers between two of equal length."""
    if low == high:
        return [low]
    rest = len(low) - 1
    if low[0] == high[0]:
        return [low[0] + part for part in _digits(low[1:], high[1:])]
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return [f"[{low[0]}-{high[0]}]" + (f"[0-9]{{{rest}}}" if rest else "")]
    parts, first, last = [], int(low[0]), int(high[0])
    if not set(low[1:]) <= {"0"}:
        parts += [low[0] + part for part in _digits(low[1:], "9" * rest)]
        first += 1
    tail = []
    if not set(high[1:]) <= {"9"}:
        tail = [high[0] + part for part in _digits("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return parts + tail


def decimals(
    low: float | None, high: float | None, above: bool = False, below: bool = False
) -> str:
    """Decimal numbers without an exponent within whole bounds; arguments as for `integers`."""
    if low is None and high is None:
        return rf"-?(?:0|[1-9][0-9]*){FRACTION}"
    least, most = (None if x is None else int(x) for x in (low, high))
    if (least, most) != (low, high):
        raise ConfigError(
            f"bounds of a number are whole here, not {low} and {high}: take the nearest whole "
            "ones, an integer, or an enum"
        )
    if least is not None and most is not None and least + (above or below) > most:
        raise ConfigError(f"no number lies between {low} and {high}")
    # What begins with n lies in [n, n + 1), what begins with -n in (-n - 1, -n].
    parts = []
    if most is None or most > 0:
        first = max(least or 0, 0)
        parts += _beginning("", first, most, above and least == first)
    if least is None or least < 0:
        first = max(-(most or 0), 0) if most is not None else 0
        end = None if least is None else -least
        parts += _beginning("-", first, end, below and most == -first)
    if most is not None and most >= 0 and not below:
        parts.append(str(most))
    if least is not None and least < 0 and not above:
        parts.append(str(least))
    return either(parts)


def _beginning(sign: str, first: int, end: int | None, without: bool) -> list[str]:
    """Numbers from ``first`` >= 0 up to and without ``end``; maybe ``without`` the first itself."""
    parts = [rf"{sign}{first}\.[0-9]*[1-9]"] if without else []
    if end is None or first + without < end:
        return [
            *parts,
            sign + _natural(first + without, None if end is None else end - 1) + FRACTION,
        ]
    return parts
