"""From a JSON schema to the expression of the texts that satisfy it.

What is written is a part of what a schema allows: properties in their declared order, at most one
blank behind a comma or a colon, strings without escapes that are not needed, numbers without an
exponent, recursion to a depth of three.  What cannot be kept is refused, never ignored.

That is why this is not `outlines_core.json_schema.build_regex_from_schema`, which (0.2.14) reads
over ``minimum``, ``maximum``, ``multipleOf``, ``uniqueItems``, ``minProperties`` and
``patternProperties``, drops ``items`` beside ``prefixItems``, matches a ``pattern`` from its start
and copies quotes out of it, takes parts of ``oneOf`` that overlap and values of ``enum`` of another
``type``, knows no ``ipv4``, ``hostname`` or boolean schemas, and allows 31 February and times
without a zone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from ..core.errors import ConfigError, one_line, short
from .numbers import decimals, integers
from .patterns import CHARACTER, either, literal, string_pattern

DEPTH = 3  # of recursive schemas, and of values of any kind
COMMA, COLON = ", ?", ": ?"
TEXT = f'"{CHARACTER}*"'
ANNOTATIONS = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default",
    "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
}  # fmt: skip
OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}
MONTHS = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
DATE = f"[1-9][0-9]{{3}}-(?:{MONTHS}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
TIME = f"{CLOCK}(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
LABEL = "[a-z0-9](?:[a-z0-9-]{0,20}[a-z0-9])?"
OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{LABEL}(?:\.{LABEL})+",
    "ipv4": rf"{OCTET}(?:\.{OCTET}){{3}}",
    "hostname": rf"{LABEL}(?:\.{LABEL})*",
    "uri": rf"https?://{LABEL}(?:\.{LABEL})*(?:/[A-Za-z0-9._~-]*)*",
}


Write = Callable[[Mapping[str, Any], str], str]


class TooDeep(Exception):
    """A schema that contains itself, beyond the depth that is written."""


def schema_of(source: Any) -> Mapping[str, Any]:
    """The schema in a pydantic class, a dictionary or a file."""
    if isinstance(source, str | PathLike):
        try:
            with open(source, encoding="utf-8") as file:
                source = json.load(file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the schema cannot be read from {short(source)}: {one_line(error)}"
            ) from None
    elif isinstance(source, type):
        source = source.model_json_schema()  # type: ignore[attr-defined]
    if not isinstance(source, Mapping):
        raise ConfigError(f"a JSON schema is an object, not {short(source)}")
    return source


def schema_pattern(schema: Mapping[str, Any]) -> str:
    """The expression of the JSON texts that are written for a schema.

    Raises `ConfigError` for one that is not well formed, and for what is not supported.
    """
    writer = _Writer(schema)
    try:
        return writer.value(schema, "#")
    except TooDeep:
        raise ConfigError(
            "the schema contains itself without end: make what leads back optional"
        ) from None
    except (AttributeError, TypeError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the schema is not well formed: {one_line(error)}") from None


class _Writer:
    """Writes expressions for the parts of one schema; ``path`` says where a part is."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.open: list[str] = []  # references that are being followed

    def value(self, schema: Any, path: str) -> str:
        """The texts of a schema."""
        if schema is True:
            return anything(DEPTH)
        if not isinstance(schema, Mapping):
            raise ConfigError(f"{path} of the schema is {short(schema)}, which allows nothing")
        used = {key for key in schema if key not in ANNOTATIONS}
        for key, write in self._combining().items():
            if key in used:
                _only(used - {key}, {"type"} if key in ("enum", "const") else set(), key, path)
                return write(schema, path)
        known = set().union(*OF_TYPE.values()) | {"type"}
        for key in sorted(used - known):
            raise ConfigError(f"{path} of the schema has {key!r}, which is not supported")
        if not used:
            return anything(DEPTH)
        types = _types(schema, used, path)
        _only(used - {"type"}, set().union(*(OF_TYPE[t] for t in types)), "/".join(types), path)
        return either(self._types()[name](schema, path) for name in types)

    def _types(self) -> dict[str, Write]:
        return {
            "object": self._object, "array": self._array, "string": self._string,
            "integer": lambda schema, path: integers(*_bounds(schema, path)),
            "number": lambda schema, path: decimals(*_bounds(schema, path)),
            "boolean": lambda *_: "(?:true|false)", "null": lambda *_: "null",
        }  # fmt: skip

    def _combining(self) -> dict[str, Write]:
        return {
            "$ref": self._reference, "allOf": self._all, "anyOf": self._any, "oneOf": self._any,
            "enum": self._enum, "const": self._enum,
        }  # fmt: skip

    def _resolve(self, name: Any, path: str) -> Any:
        """What a reference stands for."""
        if not isinstance(name, str) or not name.startswith("#"):
            raise ConfigError(f"{path} of the schema refers to {short(name)}: keep it in one file")
        target: Any = self.root
        for key in name[1:].strip("/").split("/") if name.strip("#/") else ():
            key = key.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, Mapping) or key not in target:
                raise ConfigError(f"{path} of the schema refers to {name}, which is not there")
            target = target[key]
        return target

    def _reference(self, schema: Mapping[str, Any], path: str) -> str:
        name = schema["$ref"]
        target = self._resolve(name, path)
        if self.open.count(name) >= DEPTH:
            raise TooDeep
        self.open.append(name)
        try:
            return self.value(target, name)
        finally:
            self.open.pop()

    def _all(self, schema: Mapping[str, Any], path: str) -> str:
        if len(schema["allOf"]) != 1:
            raise ConfigError(f"{path} of the schema has several in allOf: write them as one")
        return self.value(schema["allOf"][0], f"{path}/allOf/0")

    def _any(self, schema: Mapping[str, Any], path: str) -> str:
        key = "anyOf" if "anyOf" in schema else "oneOf"
        parts = schema[key]
        if key == "oneOf":
            for i, part in enumerate(parts):
                if not all(self._disjoint(part, other, path) for other in parts[:i]):
                    raise ConfigError(
                        f"{path} of the schema has oneOf whose parts may overlap: use anyOf, or a "
                        "required property with a const of its own in each"
                    )
        written = []
        for i, part in enumerate(parts):
            try:
                written.append(self.value(part, f"{path}/{key}/{i}"))
            except TooDeep:
                continue
        if not written:
            raise TooDeep
        return either(written)

    def _disjoint(self, a: Any, b: Any, path: str) -> bool:
        """Whether no value satisfies both, as far as types and constants tell."""
        a, b = self._followed(a, path), self._followed(b, path)
        mine, other = _constants(a), _constants(b)
        if mine is not None and other is not None:
            return not any(x == y and _same_kind(x, y) for x in mine for y in other)
        kinds = [_kinds(x) for x in (a, b)]
        if kinds[0] and kinds[1] and not kinds[0] & kinds[1]:
            return True
        shared = set(a.get("required", ())) & set(b.get("required", ()))
        both_objects = kinds[0] == kinds[1] == {"object"}
        return both_objects and any(
            self._disjoint(a["properties"][name], b["properties"][name], path)
            for name in shared
            if _constants(a["properties"].get(name, {})) is not None
            and _constants(b["properties"].get(name, {})) is not None
        )

    def _followed(self, schema: Any, path: str) -> Mapping[str, Any]:
        for _ in range(DEPTH):
            if isinstance(schema, Mapping) and "$ref" in schema:
                schema = self._resolve(schema["$ref"], path)
        return schema if isinstance(schema, Mapping) else {}

    def _enum(self, schema: Mapping[str, Any], path: str) -> str:
        values = _constants(schema) or []
        if "type" in schema:
            wanted = _listed(schema["type"])
            values = [v for v in values if any(_is(v, kind) for kind in wanted)]
        if not values:
            raise ConfigError(f"{path} of the schema allows no value")
        return either(map(constant, values))

    def _string(self, schema: Mapping[str, Any], path: str) -> str:
        given = [key for key in ("pattern", "format") if key in schema]
        bounds = [key for key in ("minLength", "maxLength") if key in schema]
        if len(given) + bool(bounds) > 1:
            raise ConfigError(
                f"{path} of the schema has {(given + bounds)[0]} and {(given + bounds)[1]}, which "
                "cannot be combined: write them as one pattern"
            )
        if "pattern" in schema:
            return f'"{string_pattern(schema["pattern"], path)}"'
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise ConfigError(
                    f"{path} of the schema has the format {short(schema['format'])}; supported: "
                    + ", ".join(sorted(FORMATS))
                )
            return f'"(?:{FORMATS[schema["format"]]})"'
        return f'"{CHARACTER}{_times(schema, "minLength", "maxLength", path)}"'

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        least, most = _range(schema, "minItems", "maxItems", path)
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise ConfigError(f"{path} of the schema has 'uniqueItems', which is not supported")
        first = [
            self.value(part, f"{path}/prefixItems/{i}")
            for i, part in enumerate(schema.get("prefixItems", ()))
        ]
        rest: str | None = None
        if schema.get("items", True) is not False:
            try:
                rest = self.value(schema.get("items", True), f"{path}/items")
            except TooDeep:
                if least > len(first):
                    raise
        return "\\[" + items(first, rest, least, most) + "\\]"

    def _object(self, schema: Mapping[str, Any], path: str) -> str:
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        more = schema.get("additionalProperties", True)
        for name in sorted(required - set(properties)):
            raise ConfigError(
                f"{path} of the schema requires {name!r}, which its properties do not have"
            )
        if not properties:
            if more is False:
                return "\\{\\}"
            try:
                each = f"{TEXT}{COLON}{self.value(more, f'{path}/additionalProperties')}"
            except TooDeep:
                return "\\{\\}"
            return f"\\{{(?:{each}(?:{COMMA}{each})*)?\\}}"
        members: list[tuple[str, bool]] = []
        for name, part in properties.items():
            try:
                written = self.value(part, f"{path}/properties/{name}")
            except TooDeep:
                if name in required:
                    raise
                continue
            members.append((f"{constant(name)}{COLON}{written}", name in required))
        return "\\{" + joined(members) + "\\}"


def joined(members: Sequence[tuple[str, bool]]) -> str:
    """Members of an object, of which those that are not required may be left out."""
    tails = [""]  # what may follow a member
    for text, needed in reversed(members):
        tails.append((f"{COMMA}{text}" if needed else f"(?:{COMMA}{text})?") + tails[-1])
    tails.reverse()
    starts = []  # a member that comes first, and what follows
    for i, (text, needed) in enumerate(members):
        starts.append(text + tails[i + 1])
        if needed:
            return either(starts)
    return f"(?:{either(starts)})?" if starts else ""


def items(first: Sequence[str], rest: str | None, least: int, most: int | None) -> str:
    """Items of an array: those of ``first``, then any number of ``rest``; ``least`` to ``most``."""
    most = len(first) if rest is None else most
    if least > (least if most is None else most):
        raise ConfigError(f"an array has {least} items at least and {most} at most")
    text = ""
    if rest is not None and (most is None or most > len(first)):
        low = max(least - len(first), 0)
        high = None if most is None else most - len(first)
        if first:
            text = f"(?:{COMMA}{rest}){_count(low, high)}"
        else:
            more = f"{rest}(?:{COMMA}{rest}){_count(max(low - 1, 0), high and high - 1)}"
            return more if low else f"(?:{more})?"
    for i in range(len(first) - 1, -1, -1):
        if most is not None and i >= most:
            continue
        text = (COMMA if i else "") + first[i] + text
        text = text if least > i else f"(?:{text})?"
    return text


def anything(depth: int) -> str:
    """Any JSON value, arrays and objects nested to a depth."""
    plain = f"{TEXT}|{decimals(None, None)}|true|false|null"
    if not depth:
        return f"(?:{plain})"
    inner = anything(depth - 1)
    member = f"{TEXT}{COLON}{inner}"
    array = f"\\[(?:{inner}(?:{COMMA}{inner})*)?\\]"
    return f"(?:{plain}|{array}|\\{{(?:{member}(?:{COMMA}{member})*)?\\}})"


def constant(value: Any) -> str:
    """One value as it is written."""
    if isinstance(value, Mapping):
        inner = COMMA.join(f"{constant(k)}{COLON}{constant(v)}" for k, v in value.items())
        return f"\\{{{inner}\\}}"
    if isinstance(value, list | tuple):
        return "\\[" + COMMA.join(map(constant, value)) + "\\]"
    return literal(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _only(used: set[str], known: set[str], what: str, path: str) -> None:
    for key in sorted(used - known):
        raise ConfigError(f"{path} of the schema has {key!r} beside {what}: not supported")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _types(schema: Mapping[str, Any], used: set[str], path: str) -> list[str]:
    """The types that are written; where none is named, the one that the keywords are about."""
    if "type" in schema:
        types = _listed(schema["type"])
        for name in types:
            if name not in OF_TYPE:
                raise ConfigError(f"{path} of the schema has the type {short(name)}")
        return [t for t in types if not (t == "integer" and "number" in types)]
    return [next(name for name, keys in OF_TYPE.items() if keys & used)]


def _constants(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """JSON types that may satisfy a schema; none where that is not said."""
    values = _constants(schema)
    if values is not None:
        return {kind for v in values for kind in OF_TYPE if kind != "integer" and _is(v, kind)}
    return {"number" if kind == "integer" else kind for kind in _listed(schema.get("type", []))}


def _is(value: Any, kind: str) -> bool:
    """Whether a value has a JSON type."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return {
        "object": isinstance(value, Mapping), "array": isinstance(value, list),
        "string": isinstance(value, str), "number": number,
        "integer": number and value == int(value), "boolean": isinstance(value, bool),
        "null": value is None,
    }[kind]  # fmt: skip


def _same_kind(x: Any, y: Any) -> bool:
    return isinstance(x, bool) == isinstance(y, bool)


def _range(schema: Mapping[str, Any], low: str, high: str, path: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for value in (least, most):
        if value is not None and (isinstance(value, bool) or value != int(value) or value < 0):
            raise ConfigError(f"{path} of the schema has {low} or {high} that is no count")
    if most is not None and least > most:
        raise ConfigError(f"{path} of the schema has {low}={least} above {high}={most}")
    return int(least), None if most is None else int(most)


def _times(schema: Mapping[str, Any], low: str, high: str, path: str) -> str:
    return _count(*_range(schema, low, high, path))


def _count(least: int, most: int | None) -> str:
    if (least, most) == (0, None):
        return "*"
    return f"{{{least},{'' if most is None else most}}}"


def _bounds(schema: Mapping[str, Any], path: str) -> tuple[Any, Any, bool, bool]:
    """Least and largest number, and whether each is itself left out."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    for value in (low, high, above, below):
        if value is not None and not _is(value, "number"):
            raise ConfigError(f"{path} of the schema has a bound that is no number")
    open_low = above is not None and (low is None or above >= low)
    open_high = below is not None and (high is None or below <= high)
    return above if open_low else low, below if open_high else high, open_low, open_high
