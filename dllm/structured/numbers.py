"""Expressions of the numbers within bounds, and multiples, as JSON writes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction

from .parts import Budget, ByteAutomaton, Edge, TooLarge, Unfit, minimal

FRACTION = r"(?:\.[0-9]+)?"
State = tuple[int, int, bool]
MOST_STATES = 10_000  # of the automaton of the multiples of a number


def either(texts: Iterable[str]) -> str:
    """One of several expressions."""
    each = list(dict.fromkeys(texts))
    return each[0] if len(each) == 1 else "(?:" + "|".join(each) + ")"


def integers(
    low: float | None, high: float | None, above: bool = False, below: bool = False
) -> str:
    """Whole numbers from ``low`` to ``high``, None being no bound; ``above``, ``below``: without
    the bound itself.  Raises `Unfit` where there are none."""
    least = None if low is None else math.floor(low) + 1 if above else math.ceil(low)
    most = None if high is None else math.ceil(high) - 1 if below else math.floor(high)
    if least is not None and most is not None and least > most:
        raise Unfit(f"no whole number lies between {low} and {high}")
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
) -> list[str]:
    """Decimal numbers without an exponent; arguments as for `integers`.  Each is within the bounds
    that matches all of the expressions."""
    whole = "(?:0|[1-9][0-9]*)"
    result = [] if low is not None and high is not None else [f"-?{whole}{FRACTION}"]
    for bound, strict, sign in ((low, above, 1), (high, below, -1)):
        if bound is None:
            continue
        size = sign * Decimal(repr(bound))
        # What lies beyond a bound towards zero and further, and what lies between it and zero.
        outward, inward = ("", "-") if sign > 0 else ("-", "")
        if size >= 0:
            parts = [outward + _at_least(size, strict)]
            parts += ["-?0(?:\\.0+)?"] if size == 0 and not strict else []
        else:
            parts = [f"{outward}{whole}{FRACTION}", inward + _at_most(-size, strict)]
        result.append(either(parts))
    return result


def _split(size: Decimal) -> tuple[int, str]:
    """The whole part of a number from 0, and its digits behind the point."""
    whole, _, digits = f"{size:f}".partition(".")
    return int(whole), digits.rstrip("0")


def _at_least(size: Decimal, strict: bool) -> str:
    """Numbers from ``size`` >= 0 on; ``strict``: without it."""
    whole, digits = _split(size)
    end = "[0-9]*[1-9][0-9]*" if strict else "[0-9]*"
    parts = [_natural(whole + 1, None) + FRACTION]
    if not digits and not strict:
        return either([*parts, f"{whole}{FRACTION}"])
    for i, digit in enumerate(digits):
        if digit < "9":
            parts.append(rf"{whole}\.{digits[:i]}[{int(digit) + 1}-9][0-9]*")
    return either([*parts, rf"{whole}\.{digits}{end}"])


def _at_most(size: Decimal, strict: bool) -> str:
    """Numbers from 0 to ``size``; ``strict``: without it."""
    whole, digits = _split(size)
    parts = [_natural(0, whole - 1) + FRACTION] if whole else []
    for i, digit in enumerate(digits):
        parts.append(rf"{whole}\.{digits[:i]}" if i else f"{whole}")
        if digit > "0":
            parts.append(rf"{whole}\.{digits[:i]}[0-{int(digit) - 1}][0-9]*")
    if not strict:
        parts.append(rf"{whole}\.{digits}0*" if digits else rf"{whole}(?:\.0+)?")
    return either(parts) if parts else "[^\\S\\s]"


def multiples(step: float, whole: bool, budget: Budget) -> ByteAutomaton:
    """The multiples of ``step``; ``whole``: only those without a point."""
    exact = Fraction(Decimal(repr(step)))
    places = 0 if whole else max(0, -int(Decimal(repr(step)).normalize().as_tuple().exponent))
    size = exact.numerator if whole else int(exact * 10**places)
    if size * (places + 1) > MOST_STATES:
        raise TooLarge(f"has a multipleOf of {step}, which is too fine: allow less")
    # A state: the digits behind the point, -1 before it, -2 behind a leading zero, -3 at the start,
    # -4 behind a sign; the remainder; whether a digit has to follow.
    number = {(-3, 0, True): 0}
    rows: list[list[Edge]] = []
    for place, rest, _ in list_of(number):
        row = []
        digits = "" if place == -2 else "0123456789" if place < places else "0"
        for byte in "-." + digits:
            if byte == "-":
                to = (-4, 0, True) if place == -3 else None
            elif byte == ".":
                to = None if whole or place not in (-1, -2) else (0, rest, True)
            elif place >= 0:
                more = (rest * 10 + int(byte)) % size if place < places else rest
                to = min(place + 1, places), more, False
            else:
                first = place in (-3, -4) and byte == "0"
                to = -2 if first else -1, (rest * 10 + int(byte)) % size, False
            if to is not None:
                row.append((ord(byte), ord(byte), number.setdefault(to, len(number))))
        rows.append(sorted(row))
        budget.spend(1 + len(row))
    ends = [
        not open_ and rest * 10 ** (places - max(place, 0)) % size == 0
        for place, rest, open_ in number
    ]
    return minimal(rows, ends, budget)


def list_of(number: dict[State, int]) -> Iterator[State]:
    """The keys of a dictionary that grows while they are read."""
    done = 0
    while done < len(number):
        for state in list(number)[done:]:
            done += 1
            yield state
