"""What keywords of a JSON schema say: which there are, and of which values each speaks."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urljoin

from ..core.errors import ConfigError, short
from .byte_automaton import Empty

OPEN = "unevaluatedProperties"  # what no keyword beside it speaks of, nor any of their parts
KEYWORDS: dict[str, set[Any]] = {
    "object": {"properties", "required", "additionalProperties", "patternProperties",
               "propertyNames", "minProperties", "maxProperties", OPEN},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems",
              "contains", "minContains", "maxContains"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "boolean": set(), "null": set(),
}  # fmt: skip
NAMES = (*KEYWORDS, "integer")
KINDS: tuple[tuple[str, Any], ...] = (
    ("null", type(None)), ("boolean", bool), ("number", int | float), ("string", str),
    ("array", list), ("object", Mapping),
)  # fmt: skip
REFUSED = {  # and what to write in place of each
    "contains": "describe all items", "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref", "$recursiveRef": "use $ref",
}  # fmt: skip
DATA = {"const", "enum", "default", "example", "examples"}  # keywords that hold values
NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependencies",
         "dependentSchemas"}  # fmt: skip
Schema = Mapping[str, Any]
# Those that stand for other schemas.
COMBINING = {"$ref", "allOf", "not", "anyOf", "oneOf"}
CONDITION = ("if", "then", "else")
DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
INNER = {*COMBINING, *CONDITION, *DEPENDENCIES}
CHECKED = {*INNER, *REFUSED, "const", "enum", "type"}.union(*KEYWORDS.values())


class Nothing(Empty):
    """A schema that no value satisfies; made of its path."""

    def __str__(self) -> str:
        return f"allows no value at {self.args[0]}"


class TooDeep(Nothing):
    """One that contains itself, beyond the depth that is written."""

    def __str__(self) -> str:
        return "contains itself without end: make what leads back optional"


Keys = tuple[str, ...]


def rebased(schema: Any, keys: Keys = ()) -> Any:
    """A schema as it stands under ``keys`` of another: what its references name, by a path, an
    anchor or an ``$id``, which parts lose, they name by its path from the root of the other."""
    places: dict[str, Keys | None] = {"": keys}
    _rebased(schema, keys, "", places)  # which finds them
    return _rebased(schema, keys, "", places)


def _rebased(schema: Any, keys: Keys, uri: str, places: dict[str, Keys | None]) -> Any:
    if isinstance(schema, list):
        return [_rebased(each, (*keys, str(i)), uri, places) for i, each in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    own, target = schema.get("$id", schema.get("id")), schema.get("$ref")
    names = [f"#{schema[key]}" for key in ("$anchor", "$dynamicAnchor") if key in schema]
    if isinstance(own, str):
        if keys == places[""] or ("$id" in schema and not own.startswith("#")):
            uri, own = _joined(uri, own), ""
        names.append(own)
    for name in names:
        whole = _joined(uri, name)
        if places.setdefault(whole, keys) != keys:
            places[whole] = None  # it stands for several
    data = () if keys and keys[-1] in NAMED else DATA
    schema = {
        k: v if k in data else _rebased(v, (*keys, k), uri, places)
        for k, v in schema.items() if not (k == "$id" and keys and isinstance(v, str))
    }  # fmt: skip
    if isinstance(target, str):
        name = _joined(uri, target)
        whole, _, path = name.partition("#")
        at, path = (places[name], "") if name in places else (places.get(whole), path)
        if at is not None:
            here = ("/" + quote(key.replace("~", "~0").replace("/", "~1"), "$") for key in at)
            schema["$ref"] = f"#{''.join(here)}{path and '/' + path.removeprefix('/')}"
    return schema


def _joined(base: str, name: str) -> str:
    """What a reference or a name means in a part that has a name."""
    with suppress(ValueError):
        return (base + name if name.startswith("#") else urljoin(base, name)).rstrip("#")
    return name


def without(schema: Schema, key: str) -> dict[str, Any]:
    return {k: v for k, v in schema.items() if k != key and k in CHECKED}


def isolated(schema: Any, path: str) -> Any:
    """A schema whose unevaluated properties are among its additional ones: not those of others."""
    if not isinstance(schema, Mapping) or OPEN not in schema:
        return schema
    beside = [key for key in schema if key in INNER]
    if beside and schema[OPEN] not in (True, {}):
        raise ConfigError(
            f"{path} of the schema has {OPEN!r} beside {beside[0]!r} in a part of allOf, a $ref "
            "or a condition: write it around all of them"
        )
    return {"additionalProperties": schema[OPEN], **without(schema, OPEN)}


def as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def types_of(schema: Schema, path: str) -> list[str] | None:
    """The types that are written; where none is, those the keywords are about; None for any."""
    if "type" in schema:
        types = as_list(schema["type"])
        for name in types:
            if name not in NAMES and name != "any":
                raise ConfigError(f"{path} of the schema has the type {short(name)}")
        if "any" in types:
            return None
        return [t for t in types if not (t == "integer" and "number" in types)]
    return [name for name, keys in KEYWORDS.items() if keys & schema.keys()] or None


def constants_of(schema: Any) -> list[Any] | None:
    if not isinstance(schema, Mapping):
        return None
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    return None if found is None else list(found)


def items_of(schema: Schema) -> tuple[list[Any], Any]:
    """The schemas of an array's first items, and that of all others; also as before 2020-12."""
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    return (rest, schema.get("additionalItems", True)) if isinstance(rest, list) else (first, rest)


def canonical(value: Any) -> str:
    """Equal for equal JSON values: 1.0 is 1."""

    def number(x: str) -> float:
        return int(float(x)) if float(x).is_integer() else float(x)

    return json.dumps(json.loads(json.dumps(value), parse_float=number), sort_keys=True)


def kinds_of(schema: Schema) -> set[str] | None:
    """JSON types that may satisfy a schema; None where that is not said."""
    values = constants_of(schema)
    if values is not None:
        return {*map(kind_of, values)}
    if "type" not in schema or "any" in as_list(schema["type"]):
        return None
    return {"number" if kind == "integer" else kind for kind in as_list(schema["type"])}


def kind_of(value: Any) -> str:
    return next(name for name, kind in KINDS if isinstance(value, kind))


def is_a(value: Any, kind: str) -> bool:
    own = kind_of(value)
    return kind in (own, "any") or (kind == "integer" and own == "number" and value == int(value))


def counts_of(schema: Schema, low: str, high: str, path: str) -> tuple[int, int | None]:
    least, most = schema.get(low, 0), schema.get(high)
    for value in (least, most):
        if value is not None and not (
            is_a(value, "number") and 0 <= value < math.inf and value == int(value)
        ):
            raise ConfigError(f"{path} of the schema has {low} or {high} that is no count")
    if most is not None and least > most:
        raise Nothing(path)
    return int(least), None if most is None else int(most)


def bounds_of(schema: Schema, path: str) -> tuple[Any, Any, bool, bool]:
    """Least and largest number, and whether each is itself left out."""
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if isinstance(above, bool):  # as before draft 6
        above = low if above else None
    if isinstance(below, bool):
        below = high if below else None
    for value in (low, high, above, below):
        if value is not None and not (is_a(value, "number") and -math.inf < value < math.inf):
            raise ConfigError(f"{path} of the schema has a bound that is no number")
    open_low = above is not None and (low is None or above >= low)
    open_high = below is not None and (high is None or below <= high)
    return above if open_low else low, below if open_high else high, open_low, open_high
