"""Automata of numbers as JSON writes them without an exponent: within bounds, and multiples."""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from .byte_automaton import Budget, ByteAutomaton, Edge, TooLarge, combined, minimal
from .expressions import regex_part
from .parts import automaton_of

EXACT = 2**53  # below it, numbers are read more closely than by 1
MOST_STATES = 10_000  # of the automaton of the multiples of a number


def numbers(
    low: float | None, high: float | None, above: bool, below: bool, step: float | None,
    whole: bool, budget: Budget,
) -> ByteAutomaton:  # fmt: skip
    """Numbers from ``low`` to ``high``, None being no bound; ``above``, ``below``: without the
    bound itself.  Multiples of ``step``, unless it is None; ``whole``: without a point.  Raises
    `Unfit` where there are none."""
    shape = r"-?[1-9][0-9]*|0" if whole else r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"
    found = automaton_of(regex_part(shape), budget)
    for bound, side, strict in ((low, 1, above), (high, -1, below)):
        if strict and not whole and bound and abs(bound) < EXACT:
            # What is nearer to it is read as the bound itself.
            bound, strict = math.nextafter(bound, side * math.inf), False
        if bound is not None:
            exact = Decimal(repr(bound) if abs(bound) < EXACT else int(bound))
            found = combined(found, _beyond(exact, side, strict, budget), budget)
    return found if step is None else combined(found, _multiples(step, whole, budget), budget)


def _explored(
    start: Any, step: Callable[[Any, str], Any], accepts: Callable[[Any], bool], budget: Budget
) -> ByteAutomaton:
    """The automaton of the states that digits, a point and a sign lead to; None is nowhere."""
    number, states, rows = {start: 0}, [start], list[list[Edge]]()
    for state in states:  # which grows
        row: list[Edge] = []
        for byte in b"-.0123456789":
            to = step(state, chr(byte))
            if to is not None:
                row.append((byte, byte, number.setdefault(to, len(states))))
                states += [to] * (row[-1][2] == len(states))
        budget.spend(1 + len(row))
        rows.append(row)
    return minimal(rows, [accepts(state) for state in states], budget)


def _beyond(bound: Decimal, side: int, strict: bool, budget: Budget) -> ByteAutomaton:
    """Numbers on one ``side`` of a bound, 1: above it, -1: below; ``strict``: without it."""
    before, _, behind = f"{abs(bound):f}".partition(".")
    behind = behind.rstrip("0")

    # A state: whether there is a sign; the digits before the point, or all of those that count and
    # then those behind it, as a number below 0; how the size compares with that of the bound.
    def step(state: tuple[bool, int, int], byte: str) -> tuple[bool, int, int]:
        negative, place, found = state
        if byte == "-":
            return True, place, found
        if byte == ".":
            return negative, -1, whole(place, found)
        if place < 0:
            digit = behind[-1 - place] if -1 - place < len(behind) else "0"
            found = found or (byte > digit) - (byte < digit)
            return negative, max(place - 1, -1 - len(behind)), found
        if place < len(before):
            found = found or (byte > before[place]) - (byte < before[place])
        return negative, min(place + 1, len(before) + 1), found

    def whole(place: int, found: int) -> int:
        return found if place == len(before) else 1 if place > len(before) else -1

    def accepts(state: tuple[bool, int, int]) -> bool:
        negative, place, found = state
        found = whole(place, found) if place >= 0 else found
        if place > -1 - len(behind) and behind:  # digits of the bound are left
            found = found or -1
        if bound < 0:
            found = -found if negative else 1
        elif negative:
            found = 0 if found == bound == 0 else -1
        return found * side > 0 or (found == 0 and not strict)

    return _explored((False, 0, 0), step, accepts, budget)


def _multiples(size: float, whole: bool, budget: Budget) -> ByteAutomaton:
    """The multiples of a number; ``whole``: those without a point."""
    exact = Fraction(Decimal(repr(size)))
    places = 0 if whole else max(0, -int(Decimal(repr(size)).normalize().as_tuple().exponent))
    unit = exact.numerator if whole else int(exact * 10**places)
    if unit * (places + 1) > MOST_STATES:
        raise TooLarge(f"has a multipleOf of {size}, which is too fine: allow less")

    # A state: the digits behind the point, -1 before it; the remainder.
    def step(state: tuple[int, int], byte: str) -> tuple[int, int] | None:
        place, rest = state
        if byte in "-.":
            return state if byte == "-" else (0, rest)
        if place == places:
            return state if byte == "0" else None
        return place + (place >= 0), (rest * 10 + int(byte)) % unit

    def accepts(state: tuple[int, int]) -> bool:
        place, rest = state
        return bool(rest * 10 ** (places - max(place, 0)) % unit == 0)

    return _explored((-1, 0), step, accepts, budget)
