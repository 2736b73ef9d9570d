"""Objects of JSON schemas."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..core.errors import ConfigError
from .byte_automaton import ByteAutomaton, Empty
from .keywords import OPEN, Nothing, Schema, constants_of, counts_of
from .merging import merged
from .parts import Bytes, Either, Leaf, Members, Mixed, Part, Repeat, Row, automaton_of
from .values import COLON, COMMA, QUOTE, Base, listed, pattern_of, written

NONE = ByteAutomaton([[]], [False])
KINDS, MOST_KINDS = 5, 6  # of undeclared names, where so many have to differ
MOST_WRONG = 4  # properties whose values count, of names that may stand twice
MOST_NEEDED = 3, 6  # properties that stand in any order; in schemas that may not hold


def record(reader: Base, schema: Schema, path: str) -> Part:
    least, most = counts_of(schema, "minProperties", "maxProperties", path)
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if isinstance(required, bool):  # it is about the object that this one is a property of
        required = ()
    if isinstance(required, str) or not all(isinstance(name, str) for name in required):
        raise ConfigError(f"{path} of the schema has a required that is no list of names")
    more = schema.get("additionalProperties", schema.get(OPEN, True))
    named = schema.get("patternProperties", {})
    keys = schema.get("propertyNames", True)
    needed = {*required}
    for name, part in properties.items():
        if isinstance(part, Mapping) and part.get("required") is True:  # as before draft 4
            needed.add(name)
    missing = {name: more for name in required if name not in properties}
    missing |= {name: {} for name in missing if _matching(reader, named, name, path)}
    declared = {**properties, **missing}
    members: list[tuple[Part, bool]] = []
    wrong: dict[int, Part] = {}  # in whose place a later one of the same name may be right
    for name, part in declared.items():
        also = [named[pattern] for pattern in _matching(reader, named, name, path)]
        try:
            if keys is not True and not _key(reader, keys, path).accepts(written(name)):
                raise Nothing(path)
            where = f"{path}/properties/{name}"
            value = reader.all_of([*also, part], {}, where) if also else reader.value(part, where)
        except Nothing:
            if name in needed:
                raise
            continue
        key = Row((Bytes(written(name)), COLON))
        if reader.testing and (also or part not in (True, {})):
            wrong[len(members)] = Row((key, reader.value(True, path)))
        members.append((Row((key, value)), name in needed))
    # A name may be written twice; the last counts, so that not so many names are sure.
    if reader.testing or (reader.loose and least < 2):
        most_needed = MOST_NEEDED[reader.testing]
        if reader.testing and len(needed) > most_needed:
            reader.refuse(f"more than {most_needed} required properties", path)
        if len(wrong) > MOST_WRONG:
            reader.unsure, wrong = True, {}
        others = _others(reader, more, named, keys, path, [*declared])
        if others is not None:
            members.append((others, False))
            reader.unsure |= any(part not in (True, {}, False) for part in (more, *named.values()))
        if reader.testing and most:  # which names that repeat may exceed
            reader.refuse("maxProperties", path)
        ordered, again = len(needed) > most_needed, wrong if reader.testing else None
        mixed = Mixed(tuple(members), COMMA, least, most, ordered, again=again)
        return Row((Bytes(b"{"), mixed, Bytes(b"}")))
    if declared:
        if least > len(members):
            raise Nothing(path)
        low = least if least > sum(need for _, need in members) else 0
        top = None if most is None or most >= len(members) else most
        return Row((Bytes(b"{"), Members(tuple(members), COMMA, low, top), Bytes(b"}")))
    if least > 1 and (names := constants_of(reader.target(keys, path))):  # each is written once
        declared = {name: more for name in names if isinstance(name, str)}
        return record(reader, {**schema, "properties": declared}, path)
    others = _others(reader, more, named, keys, path)
    reader.repeats |= others is not None and most != 1
    if others is None and least:
        raise Nothing(path)
    if others is None or least < 2:
        return Bytes(b"{}") if others is None else listed(b"{", others, b"}", least, most)
    if least > MOST_KINDS:
        raise ConfigError(
            f"{path} of the schema has a minProperties of {least}, which is supported up to "
            f"{MOST_KINDS} for names that it does not declare: allow less"
        )
    count = max(least, KINDS)
    kinds = tuple((_of_kind(reader, others, kind, count), False) for kind in range(count))
    more = Repeat(Row((COMMA, others)), 0, None if most is None else most - least)
    return Row((Bytes(b"{"), Mixed(kinds, COMMA, least, least, once=least), more, Bytes(b"}")))


def _of_kind(reader: Base, others: Either, kind: int, count: int) -> Part:
    """Those whose names have a sum of bytes with remainder ``kind``: no two kinds share one."""
    edges = [[(b, b, (s + b) % count) for b in range(256)] for s in range(count)]
    sums, ways = ByteAutomaton(edges, [s == kind for s in range(count)]), list[Part]()
    for way in others.parts:
        assert isinstance(way, Row)
        with suppress(Empty):
            name = automaton_of(way.parts[0], reader.budget)
            ways.append(Row((Leaf(reader.combined(name, sums)), *way.parts[1:])))
    return Either(tuple(ways))


def _matching(reader: Base, named: Schema, name: str, path: str) -> list[str]:
    """The patterns of properties that a name may match."""
    return [p for p in named if _pattern(reader, p, path, True).accepts(written(name))]


def _pattern(reader: Base, pattern: str, path: str, wide: bool = False) -> ByteAutomaton:
    """Names that match a pattern in all dialects, or in one."""
    part, key = partial(pattern_of, reader, pattern, path, wide), ("pattern", pattern, wide)
    try:
        return reader.leaf(key, lambda: Row((QUOTE, part(), QUOTE))).automaton
    except Empty:
        return NONE


def _key(reader: Base, schema: Any, path: str) -> ByteAutomaton:
    """The names that a schema of names allows."""
    if schema is True:
        return reader.text().automaton
    with_type = merged({"type": "string"}, schema, path)
    return automaton_of(reader.value(with_type, f"{path}/propertyNames"), reader.budget)


def _others(
    reader: Base, more: Any, named: Schema, keys: Any, path: str, declared: Sequence[str] = ()
) -> Either | None:
    """A member that is not ``declared``; None where there is none."""
    try:
        allowed = _key(reader, keys, path)
    except Nothing:
        return None
    if declared:
        names = Either(tuple(Bytes(written(name)) for name in declared))
        try:
            allowed = reader.combined(allowed, automaton_of(names, reader.budget), without=True)
        except Empty:
            return None
    if reader.testing and len(named) > 1:
        reader.refuse("several patternProperties", path)
    groups: list[tuple[ByteAutomaton, Any]] = []
    for pattern, schema in named.items():
        with suppress(Empty):
            mine = reader.combined(allowed, _pattern(reader, pattern, path))
            for other in named:
                if other != pattern:  # keys of one pattern alone are written
                    mine = reader.combined(mine, _pattern(reader, other, path, True), without=True)
            groups.append((mine, schema))
    with suppress(Empty):
        for pattern in named:
            allowed = reader.combined(allowed, _pattern(reader, pattern, path, True), without=True)
        groups.append((allowed, more))
    ways: list[Part] = []
    for automaton, schema in groups:
        with suppress(Empty):
            value = reader.value(schema, f"{path}/additionalProperties")
            ways.append(Row((Leaf(automaton), COLON, value)))
    return Either(tuple(ways)) if ways else None
