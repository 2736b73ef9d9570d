r"""Regular expressions as Python reads them: its own parser reads them here.

``\d``, ``\w`` and ``\s`` are those of ASCII, as with `re.ASCII`.  Beyond Python, ``\p{Lu}`` is a
general category of Unicode, as in expressions of JSON schemas.
"""

import functools
import importlib
import json
import re
import unicodedata
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from ..core.errors import ConfigError, one_line, short
from .byte_automaton import DEPTH, EVERYTHING, Budget, Empty, combined
from .parts import (
    EMPTY,
    TOP,
    Bytes,
    Either,
    Leaf,
    Letters,
    Part,
    Ranges,
    Repeat,
    Row,
    automaton_of,
    both,
    erased,
    inverse,
    union,
)

Items = list[tuple[Any, re.RegexFlag]]  # of a parsed expression, and the flags of each
PARSER: Any = importlib.import_module("re._parser")  # it has no public name
SURROGATES = (0xD800, 0xDFFF)
TEXT: Ranges = inverse((SURROGATES,))
STRING = both(TEXT, inverse(((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))))  # of JSON, as it is written
ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r",
           "\t": "\\t"}  # fmt: skip
ASCII, SHOWN = ((0, 0x7F),), ((0x20, 0x7E),)
CATEGORIES: dict[str, Ranges] = {
    "DIGIT": ((0x30, 0x39),),
    "SPACE": ((0x09, 0x0D), (0x20, 0x20)),
    "WORD": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
}
# One character of a JSON string.
CHARACTER = Either((Letters(STRING), *(Bytes(f"\\{c}".encode()) for c in '"\\bfnrt')))
CHARACTERS = Repeat(CHARACTER, 0, None)
BEYOND = {
    "ASSERT": "look-around", "ASSERT_NOT": "look-around", "FAILURE": "look-around",
    "GROUPREF": "a back reference", "GROUPREF_EXISTS": "a back reference",
}  # fmt: skip
SINGLE = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}  # of one character
MARKS = range(0xF8, 0x100)  # bytes of no text, which stand for a moment behind what is possessive
BEGINS, ENDS = ("AT_BEGINNING", "AT_BEGINNING_STRING"), ("AT_END", "AT_END_STRING")
# A line break before the end of a text, which Python's ``$`` passes over.
LINE_END = ("MAX_REPEAT", (0, 1, [("LITERAL", 0x0A)]))
# JavaScript's own: surrogate pairs, properties, sets before a hyphen, code points, named groups.
PAIR = r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
BEYOND_PYTHON = re.compile(
    rf"({PAIR}-{PAIR})|"
    r"\\(?:(?:[pP]\{\^?(\w+)\}|[pP](\w)|[dDsSwW])(?=(-(?!-))?)|"
    r"u\{0*(10[\da-fA-F]{4}|[\da-fA-F]{1,5})\}|.)|\(\?<\w+>",
    re.DOTALL,
)
LONG_NAMES = {
    "Letter": "L", "Lowercase_Letter": "Ll", "Uppercase_Letter": "Lu", "Mark": "M", "Number": "N",
    "Decimal_Number": "Nd", "digit": "Nd", "Punctuation": "P", "Symbol": "S", "Separator": "Z",
}  # fmt: skip
FIRST_PROPERTY = 0x10F000  # characters for private use that stand for properties


class Variant(NamedTuple):
    """What is between the ends, and whether ``^`` and ``$`` stood there; ``looks``: look-aheads
    where it begins, and whether each is negative."""

    begins: bool
    part: Part
    ends: bool
    looks: tuple[tuple[list["Variant"], bool], ...] = ()


def regex_part(regex: str) -> Part:
    """The texts that match a regular expression of the user as a whole.

    Raises `ConfigError` for one that is not well formed, and for what no automaton has.
    """
    expression = Expression(regex, f"regex {short(regex)}", in_string=False)
    return expression.kept(Either(tuple(map(expression.seen, expression.variants()))))


def pattern_part(
    pattern: str, what: str, exact: bool = False, wide: bool = False, decoded: bool = False,
    budget: Budget | None = None,
) -> Part:  # fmt: skip
    """The content of a JSON string in which ``pattern``, an expression of a schema, is found; in
    further tries of a ``budget`` the content matches as a whole.  ``exact``: refused is what
    dialects read differently, of which a part is written otherwise; ``wide``: or read as in the
    widest of them.

    Quotes, backslashes and line breaks are written as escapes, unless it is ``decoded``.
    """
    what = f"{what} has the pattern {short(pattern)}, which"
    expression = Expression(pattern, what, True, exact, wide, decoded)
    variants = expression.variants()
    if budget is not None:
        budget.cut |= not all(v.begins and v.ends for v in variants)
        if budget.depth < DEPTH:
            variants = [v._replace(begins=True, ends=True) for v in variants]
    return expression.kept(Either(tuple(
        Row((EMPTY if v.begins else expression.more, expression.seen(v))) for v in variants
    )))  # fmt: skip


class Expression:
    """A parsed expression; ``what`` names it in errors.  ``in_string``: it is about the content of
    a JSON string, which is written with escapes unless it is ``decoded``."""

    def __init__(
        self, pattern: str, what: str, in_string: bool, exact: bool = False, wide: bool = False,
        decoded: bool = False,
    ) -> None:  # fmt: skip
        self.what, self.in_string, self.exact, self.wide = what, in_string, exact, wide
        self.escapes = in_string and not decoded
        self.more: Part = CHARACTERS if self.escapes else Repeat(Letters(TEXT), 0, None)
        self.properties: list[Ranges] = []
        self.budget = Budget()  # of sets of texts within it
        self.possessive: dict[str, Part] = {}  # what does not follow a mark, in their order
        if not isinstance(pattern, str):
            raise ConfigError(f"{what} is no text")
        pattern = BEYOND_PYTHON.sub(self._translated, pattern)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of signs that may change their meaning
                self.tree = PARSER.parse(pattern, int(re.ASCII))
        except (re.error, OverflowError, ValueError) as error:
            raise ConfigError(f"{what} is not well formed: {one_line(error)}") from None
        self.flags = re.RegexFlag(self.tree.state.flags)

    def variants(self) -> list[Variant]:
        return self._variants([(item, self.flags) for item in self.tree])

    def _translated(self, match: re.Match[str]) -> str:
        name, behind = match[2] or match[3], "\\" * bool(match[4])  # no range begins with a set
        if match[1] is not None:
            return "-".join(bytes.fromhex(re.sub(r"\\u|-", "", match[1])).decode("utf-16-be"))
        if match[5] is not None:
            return re.escape(chr(int(match[5], 16)))
        if name is None:
            return "(" if match[0][0] == "(" else match[0] + behind
        ranges = ASCII if name == "ASCII" else general_category(LONG_NAMES.get(name, name))
        if not ranges:
            raise ConfigError(
                f"{self.what} has {match[0]}: a property is a general category, such as L or Nd"
            )
        negated = (match[0][1] == "P") != ("^" in match[0])
        self.properties.append(inverse(ranges) if negated else ranges)
        return chr(FIRST_PROPERTY + len(self.properties) - 1) + behind

    def _variants(self, items: Items) -> list[Variant]:
        """A row of items, at whose ends those of the text may stand."""
        begins = ends = False
        looks: tuple[tuple[list[Variant], bool], ...] = ()
        if self.in_string and any(_is_end(item) and flags & re.MULTILINE for item, flags in items):
            self._refuse("^ or $ with the flag m")
        while items and (_at(items[0][0]) in BEGINS or _looks_ahead(items[0][0])):
            (item, flags), *items = items
            if _at(item):
                begins = True
            else:
                looks = *looks, self._look(item, flags)
        if self.in_string and not begins and any(v.begins for ways, _ in looks for v in ways):
            self._refuse_ends()
        at = next((i for i, (item, _) in enumerate(items) if _opens(item)), None)
        if at is not None:
            return [
                Variant(begins or v.begins, v.part, v.ends, looks + v.looks)
                for v in self._ways(items[:at], *items[at], items[at + 1 :])
            ]
        while items and _at(items[-1][0]) in ENDS:
            ends, items = True, items[:-1]
        if ends and self.wide:
            items = [*items, (LINE_END, self.flags)]
        return [Variant(begins, self._items(items), ends, looks)]

    def _ways(self, before: Items, item: Any, flags: re.RegexFlag, after: Items) -> list[Variant]:
        """Of a row in which a look-ahead or an end of the text stands: one per way through it."""
        name, value = str(item[0]), item[1]
        optional = name in ("MAX_REPEAT", "MIN_REPEAT") and tuple(value[:2]) == (0, 1)
        ways: list[Any] = [[]] if optional else []
        if _looks_ahead(item):
            ways = [] if all(_is_end(each) for each, _ in after) else [[item]]
        elif name == "BRANCH":
            ways = value[1]
        elif name == "SUBPATTERN" or optional:
            ways.append(value[-1])
        if name == "SUBPATTERN":
            flags = (flags | value[1]) & ~value[2]
        self.budget.spend(100 * (1 + len(after)))  # ways multiply
        if not ways:
            if not _holds(item, _looks_ahead):
                self._refuse_ends()
            self._refuse("look-around")
        head = self._items(before)
        tails = [
            tail for way in ways
            for tail in self._variants([*((each, flags) for each in way), *after])
        ]  # fmt: skip
        if not before:
            return tails
        looks = [v for tail in tails for ways, _ in tail.looks for v in ways]
        if any(v.begins for v in tails + looks):
            self._refuse_ends()
        return [
            Variant(False, Row((head, self.seen(tail))), True) if tail.looks
            else tail._replace(part=Row((head, tail.part)))
            for tail in tails
        ]  # fmt: skip

    def _look(self, item: tuple[Any, Any], flags: re.RegexFlag) -> tuple[list[Variant], bool]:
        """What a look-ahead finds, and whether it must not."""
        name, (_, inner) = item
        if _holds(inner, _looks_ahead):
            self._refuse("look-around")
        before, negative = (self.exact, self.wide), str(name) == "ASSERT_NOT"
        if negative and self.in_string:
            self.exact, self.wide = True, not self.wide
        ways = self._variants([(each, flags) for each in inner])
        self.exact, self.wide = before
        return ways, negative

    def _closed(self, variant: Variant) -> Part:
        """With what follows up to the end of the text."""
        return variant.part if variant.ends else Row((variant.part, self.more))

    def seen(self, variant: Variant) -> Part:
        """What of the rest of a text the look-aheads of a variant see."""
        if variant.looks and self.possessive:
            self._refuse("look-around beside what is possessive")
        part = self._closed(variant) if self.in_string else variant.part
        for ways, negative in variant.looks:
            seen = Either(tuple(map(self._closed, ways)))
            try:
                sides = automaton_of(part, self.budget), automaton_of(seen, self.budget)
                part = Leaf(combined(*sides, self.budget, negative))
            except Empty:
                return Either(())
        return part

    def _items(self, items: Items) -> Part:
        parts = tuple(self._part(str(name), value, flags) for (name, value), flags in items)
        return parts[0] if len(parts) == 1 else Row(parts)

    def _row(self, items: Any, flags: re.RegexFlag) -> Part:
        return self._items([(item, flags) for item in items])

    def _part(self, name: str, value: Any, flags: re.RegexFlag) -> Part:
        if name in ("LITERAL", "NOT_LITERAL"):
            if name == "LITERAL" and value < FIRST_PROPERTY and not flags & re.IGNORECASE:
                if SURROGATES[0] <= value <= SURROGATES[1]:
                    self._refuse("half of a surrogate pair")
                text = chr(value)
                if self.escapes:
                    text = json.dumps(text, ensure_ascii=False)[1:-1]
                return Bytes(text.encode())
            ranges = self._set([("LITERAL", value)], flags)
            return self._letters(inverse(ranges) if name == "NOT_LITERAL" else ranges)
        if name == "ANY":
            return self._letters(TEXT if flags & re.DOTALL else inverse(((0x0A, 0x0A),)))
        if name == "IN":
            negated = str(value[0][0]) == "NEGATE"
            kinds = [str(given) for kind, given in value if str(kind) == "CATEGORY"]
            narrow = self.in_string and any(negated or "_NOT_" in kind for kind in kinds)
            if narrow and self.exact:
                self._refuse("a set that may not hold")
            ranges = self._set(value[negated:], flags)
            ranges = inverse(ranges) if negated else ranges
            # Dialects differ on what else these are.
            if kinds and self.wide:
                return self._letters(union((*ranges, (0x80, TOP))))
            return self._letters(both(ranges, SHOWN) if narrow else ranges)
        if name == "SUBPATTERN":
            _, added, dropped, items = value
            if added & re.UNICODE:
                self._refuse("the flag u")
            return self._row(items, (flags | added) & ~dropped)
        if name == "BRANCH":
            return Either(tuple(self._row(items, flags) for items in value[1]))
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, items = value
            return Repeat(self._row(items, flags), int(least),
                          None if most is PARSER.MAXREPEAT else int(most))  # fmt: skip
        if name == "POSSESSIVE_REPEAT":
            return self._possessive(value, flags)
        if name == "ATOMIC_GROUP":
            if all(str(kind) in SINGLE for kind, _ in value):
                return self._row(value, flags)
            if len(value) == 1 and str(value[0][0]) in ("MAX_REPEAT", "POSSESSIVE_REPEAT"):
                return self._possessive(value[0][1], flags)
            self._refuse("an atomic group of more than one repeated character")
        if name == "AT":
            if str(value) not in BEGINS + ENDS:
                self._refuse("a word boundary")
            self._refuse_ends()
        self._refuse(BEYOND.get(name, name.lower()))

    def _possessive(self, value: Any, flags: re.RegexFlag) -> Part:
        """A character as often as it can be: a mark says that no further one follows."""
        least, most, items = value
        if len(items) != 1 or str(items[0][0]) not in SINGLE:
            self._refuse("a possessive quantifier of more than one character")
        part = self.possessive.setdefault(f"{items} {flags}", self._row(items, flags))
        if len(self.possessive) > len(MARKS):
            self._refuse(f"possessive quantifiers of more than {len(MARKS)} kinds of characters")
        end = Bytes(bytes([MARKS[[*self.possessive.values()].index(part)]]))
        if most is PARSER.MAXREPEAT:
            return Row((Repeat(part, int(least), None), end))
        full = Repeat(part, int(most), int(most))
        fewer = Row((Repeat(part, int(least), int(most) - 1), end)) if least < most else full
        return Either((fewer, full))

    def kept(self, part: Part) -> Part:
        """What of a part agrees with its marks, without them."""
        if not self.possessive:
            return part
        budget = self.budget
        marks = Either(tuple(Bytes(bytes([MARKS[i]])) for i in range(len(self.possessive))))
        result, anything = automaton_of(part, budget), Leaf(EVERYTHING)
        for mark, one in zip(marks.parts, self.possessive.values(), strict=True):
            broken = Row((anything, mark, Repeat(marks, 0, None), one, anything))
            result = combined(result, automaton_of(broken, budget), budget, without=True)
        for _, byte in zip(self.possessive, MARKS, strict=False):
            result = erased(result, byte, budget)
        return Leaf(result)

    def _set(self, items: Any, flags: re.RegexFlag) -> Ranges:
        ranges: list[tuple[int, int]] = []
        for name, value in items:
            if str(name) == "CATEGORY":
                kind = str(value).removeprefix("CATEGORY_")
                known = CATEGORIES[kind.removeprefix("NOT_")]
                ranges += inverse(known) if kind.startswith("NOT_") else known
            elif str(name) == "RANGE":
                ranges.append(value)
            elif 0 <= value - FIRST_PROPERTY < len(self.properties):
                ranges += self.properties[value - FIRST_PROPERTY]
            else:
                ranges.append((value, value))
        if flags & re.IGNORECASE:  # of ASCII, as with `re.ASCII`
            for low, high, way in ((0x41, 0x5A, 0x20), (0x61, 0x7A, -0x20)):
                ranges += [(a + way, b + way) for a, b in both(union(ranges), ((low, high),))]
        return union(ranges)

    def _letters(self, ranges: Ranges) -> Part:
        """One character of a set."""
        plain = Letters(both(ranges, STRING if self.escapes else TEXT))
        if not self.escapes:
            return plain
        escaped = [
            Bytes(text.encode()) for c, text in ESCAPES.items() if both(ranges, ((ord(c), ord(c)),))
        ]
        return Either((plain, *escaped)) if escaped else plain

    def _refuse_ends(self) -> NoReturn:
        raise ConfigError(
            f"{self.what} has ^ or $ in its middle: they may stand at its ends, or at those of its "
            "alternatives"
        )

    def _refuse(self, has: str) -> NoReturn:
        raise ConfigError(
            f"{self.what} has {has}: look-ahead at the end or that repeats, look-behind, back "
            "references, boundaries, and atomic groups and possessive quantifiers of more than a "
            "character are not available"
        )


def _at(item: Any) -> str:
    return str(item[1]) if str(item[0]) == "AT" else ""


def _looks_ahead(item: Any) -> bool:
    return str(item[0]) in ("ASSERT", "ASSERT_NOT") and item[1][0] > 0


def _is_end(item: Any) -> bool:
    return _at(item) in BEGINS + ENDS


def _opens(item: Any) -> bool:
    """Whether an item is a look-ahead, or holds one, or an end of the text."""
    return not _at(item) and _holds(item, lambda each: _is_end(each) or _looks_ahead(each))


def _holds(item: Any, which: Callable[[Any], bool]) -> bool:
    """Whether an item is, or holds outside of look-around, one of some."""
    if isinstance(item, tuple) and item and str(item[0]) in ("AT", *BEYOND):
        return which(item)
    holds = isinstance(item, tuple | list | PARSER.SubPattern)
    return holds and any(_holds(each, which) for each in item)


@functools.lru_cache(64)
def general_category(name: str) -> Ranges:
    """The characters whose general category begins with ``name``."""
    return union((c, c) for c in range(TOP + 1) if unicodedata.category(chr(c)).startswith(name))
