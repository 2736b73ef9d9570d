"""Constants, strings, numbers and arrays of JSON schemas."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn

from ..core.errors import ConfigError
from .byte_automaton import Budget, ByteAutomaton, Empty, combined
from .expressions import CHARACTER, CHARACTERS, pattern_part, regex_part
from .formats import FORMATS, LENGTHS
from .keywords import (
    KEYWORDS,
    Nothing,
    Schema,
    as_list,
    bounds_of,
    canonical,
    constants_of,
    counts_of,
    is_a,
    items_of,
    kind_of,
)
from .numbers import numbers
from .parts import (
    EMPTY,
    Bytes,
    Either,
    Leaf,
    Members,
    Mixed,
    Part,
    Repeat,
    Row,
    automaton_of,
    maybe,
)

MOST_CHARACTERS, MOST_ITEMS = 1024, 64  # where a structure was too large with more
LONGEST = 160  # characters of a format that has a maxLength: longer ones are not written
MOST_TEXTS = 256  # of such values that a schema describes and does not name
MOST_UNIQUE = 6  # values that stand in any order in an array without equal items: more keep theirs
COMMA, COLON = Row((Bytes(b","), maybe(Bytes(b" ")))), Row((Bytes(b":"), maybe(Bytes(b" "))))
QUOTE = Bytes(b'"')


class Base:
    """What values are read with.  ``ignored``: unknown keywords that were met; ``spells``: whether
    strings stay parts, as one text of theirs is found without an automaton.

    ``loose``: properties stand in any order, with undeclared ones between them.  ``testing``: every
    text is read that another writes for a value of the schema, in order to take it away.
    """

    value: Callable[[Any, str], Part]  # these three are the reader's
    all_of: Callable[[Sequence[Any], Schema, str], Part]
    target: Callable[[Any, str], Any]

    def __init__(
        self, root: Schema, budget: Budget, loose: bool = False, testing: bool = False
    ) -> None:
        self.root, self.budget, self.loose = root, budget, loose or testing
        self.testing = testing
        self.wider = False  # in testing: whether other texts may be read, too
        self.dropped: str | None = None  # a format that was not heeded for that
        self.repeats = False  # whether an object may have a name twice, of which the last counts
        self.unsure = False  # in testing: whether texts of such objects may not be read
        self.open: list[str] = []  # references that are being followed
        self._back: dict[str, bool] = {}  # whether they lead back
        self.parts = 0
        self.ignored: dict[str, None] = {}
        self.spells = False
        self._leaves: dict[Any, Leaf] = {}
        self._read: dict[Any, tuple[Any, Part | Nothing]] = {}
        self._any: dict[int, Part] = {}

    def either(self, parts: Sequence[Callable[[], Part]], path: str) -> Part:
        """Alternatives, those left out that allow nothing."""
        found, failed = list[Part](), Empty(path)
        for part in parts:
            try:
                found.append(part())
            except Empty as error:
                failed = error
        if not found:
            raise failed
        return found[0] if len(found) == 1 else Either(tuple(dict.fromkeys(found)))

    def leaf(self, key: Any, make: Callable[[], Part | ByteAutomaton]) -> Leaf:
        """What ``make`` makes, as a leaf; remembered by ``key``."""
        if key not in self._leaves:
            made = make()
            automaton = made if isinstance(made, ByteAutomaton) else automaton_of(made, self.budget)
            self._leaves[key] = Leaf(automaton)
        return self._leaves[key]

    def text(self) -> Leaf:
        """Any string."""
        return self.leaf("text", lambda: Row((QUOTE, CHARACTERS, QUOTE)))

    def combined(self, a: ByteAutomaton, b: ByteAutomaton, without: bool = False) -> ByteAutomaton:
        """What both accept, or the first alone.  Raises `Empty`."""
        return combined(a, b, self.budget, without)

    def refuse(self, what: str, path: str) -> NoReturn:
        raise ConfigError(
            f"{path} of the schema has to keep {what} from holding, for oneOf, not or if, which "
            "is not supported: use anyOf, or a required property with a const of its own in each"
        )


def constants(reader: Base, schema: Schema, path: str) -> Part:
    wanted = as_list(schema.get("type", "any"))
    values = [v for v in constants_of(schema) or [] if any(is_a(v, kind) for kind in wanted)]
    if "enum" in schema and "const" in schema:
        allowed = {*map(canonical, schema["enum"])}
        values = [v for v in values if canonical(v) in allowed]
    reader.budget.spend(len(values))
    rest = {k: v for k, v in schema.items() if k not in ("enum", "const", "type")}
    for kind in dict.fromkeys(map(kind_of, values)):
        if rest.keys() & KEYWORDS[kind]:
            fits = automaton_of(reader.value({**rest, "type": kind}, path), reader.budget)
            values = [v for v in values if kind_of(v) != kind or _fits(fits, v)]
    return reader.either([partial(constant, reader, value) for value in values], path)


def _fits(automaton: ByteAutomaton, value: Any) -> bool:
    return automaton.accepts(written(int(value) if is_a(value, "integer") else value))


def constant(reader: Base, value: Any) -> Part:
    if isinstance(value, Mapping):
        if reader.testing and len(value) > 1:
            reader.refuse("an object", "a constant")
        members = [
            (Row((Bytes(written(k)), COLON, constant(reader, v))), True) for k, v in value.items()
        ]
        return Row((Bytes(b"{"), Members(tuple(members), COMMA), Bytes(b"}")))
    if isinstance(value, list | tuple):
        items = [(constant(reader, item), True) for item in value]
        return Row((Bytes(b"["), Members(tuple(items), COMMA), Bytes(b"]")))
    if reader.testing and kind_of(value) == "number":
        return number(reader, {"minimum": value, "maximum": value}, "a constant")
    if isinstance(value, float) and value.is_integer():  # 1.0 is 1
        return Either((Bytes(written(int(value))), Bytes(written(value))))
    return Bytes(written(value))


def string(reader: Base, schema: Schema, path: str) -> Part:
    least, most = counts_of(schema, "minLength", "maxLength", path)
    patterns, form = as_list(schema.get("pattern", [])), schema.get("format")
    if form is not None and form not in FORMATS:
        reader.ignored[f"format {form!r}"] = form = None
    if form is not None and reader.testing:
        if not reader.wider:
            reader.refuse(f"the format {form!r}", path)
        reader.dropped, form = form, None  # to many readers it says nothing
    if form is not None and most is not None:  # each character is as many states as the format
        fits = most >= LENGTHS.get(form.removeprefix("idn-"), math.inf)
        most = None if fits else min(most, max(least, LONGEST))
    if not reader.testing:
        most = reader.budget.within(least, most, MOST_CHARACTERS)

    def spelt() -> Part | ByteAutomaton:
        parts = [pattern_of(reader, pattern, path) for pattern in patterns]
        if form is not None:
            parts.append(regex_part(FORMATS[form]))
        if (least, most) != (0, None) or not parts:
            parts.append(Repeat(CHARACTER, least, most))
        first, *others = (Row((QUOTE, part, QUOTE)) for part in parts)
        if not others:
            return first
        result = automaton_of(first, reader.budget)
        for other in others:
            result = reader.combined(result, automaton_of(other, reader.budget))
        return result

    if reader.spells and not isinstance(made := spelt(), ByteAutomaton):
        return made
    return reader.leaf(("string", *patterns, form, least, most), spelt)


def number(reader: Base, schema: Schema, path: str, whole: bool = False) -> Part:
    low, high, above, below = bounds_of(schema, path)
    step = schema.get("multipleOf")
    if step is not None and (not is_a(step, "number") or step <= 0):
        raise ConfigError(f"{path} of the schema has a multipleOf that is no positive number")

    def leaf(step: float | None, whole: bool) -> Leaf:
        given = low, high, above, below, step, whole
        return reader.leaf(("number", *given), lambda: numbers(*given, reader.budget))

    if reader.testing and whole:  # with zeros behind a point
        integer, found = leaf(1, False), leaf(step, False)
        return Leaf(reader.combined(integer.automaton, found.automaton))
    # Behind a point, whole numbers of many digits would be rounded.
    return leaf(step, whole or (step == int(step or 0) and not reader.testing))


def array(reader: Base, schema: Schema, path: str) -> Part:
    least, most = counts_of(schema, "minItems", "maxItems", path)
    first, rest = items_of(schema)
    if schema.get("uniqueItems") and (most is None or most > 1):
        return _unique(reader, True if first else rest, least, most, path)
    if not reader.testing:
        most = reader.budget.within(least, most, MOST_ITEMS)
    found = list[Part]()
    try:
        for i, part in enumerate(first):
            found.append(reader.value(part, f"{path}/prefixItems/{i}"))
        found.append(reader.value(rest, f"{path}/items"))
    except Nothing:
        most = len(found) if most is None else min(most, len(found))
    parts, each = found[: len(first)], (found[len(first) :] or [EMPTY])[0]
    if most is not None and least > most:
        raise Nothing(path)
    reader.budget.spend(least if most is None else most)
    parts = parts[:most]
    if not parts:
        return listed(b"[", each, b"]", least, most)
    more = None if most is None else most - len(parts)
    loop: Part = Repeat(Row((COMMA, each)), max(0, least - len(parts)), more)
    for n in range(len(parts) - 1, -1, -1):
        loop = Row((COMMA if n else EMPTY, parts[n], loop))
        loop = loop if n < least else Either((loop, EMPTY))
    return Row((Bytes(b"["), loop, Bytes(b"]")))


def _unique(reader: Base, items: Any, least: int, most: int | None, path: str) -> Part:
    """Items that differ: constants, a few in any order, more in their own."""
    values = list[Any]()
    with suppress(Empty):
        fits = automaton_of(reader.value(items, f"{path}/items"), reader.budget)
        found = constants_of(reader.target(items, path))
        found = found or [json.loads(text) for text in fits.texts(MOST_TEXTS)]
        if not found:
            raise ConfigError(
                f"{path} of the schema has 'uniqueItems', which is supported for items that are "
                "constants: name them in an enum, or drop it (for a list in place of a set)"
            )
        values = [v for v in found if _fits(fits, v)]
        values = [*{canonical(value): value for value in values}.values()]
    if reader.testing and len(values) > MOST_UNIQUE:
        reader.refuse("uniqueItems", path)
    parts = tuple((constant(reader, value), False) for value in values)
    most = len(parts) if most is None else min(most, len(parts))
    if least > most:
        raise Nothing(path)
    once: Part = Members(parts, COMMA, least, None if most == len(parts) else most)
    if len(parts) <= MOST_UNIQUE:
        once = Mixed(parts, COMMA, least, most, once=len(parts))
    return Row((Bytes(b"["), once, Bytes(b"]")))


def pattern_of(reader: Base, pattern: str, path: str, wide: bool = False) -> Part:
    exact, wide = reader.testing, wide or reader.wider
    budget = None if exact or wide else reader.budget
    return pattern_part(pattern, f"{path} of the schema", exact, wide, budget=budget)


def listed(begin: bytes, item: Part, end: bytes, least: int = 0, most: int | None = None) -> Part:
    """Items with commas between them."""
    if most == 0:
        return Bytes(begin + end)
    more = Repeat(Row((COMMA, item)), max(least - 1, 0), None if most is None else most - 1)
    some = Row((item, more))
    return Row((Bytes(begin), some if least else Either((some, EMPTY)), Bytes(end)))


def written(value: Any) -> bytes:
    """One value as JSON, numbers without an exponent."""
    if isinstance(value, float) and math.isfinite(value):
        text = f"{Decimal(repr(value)):f}"  # with a point: whole ones of many digits are rounded
        return (text if "." in text else f"{text}.0").encode()
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
