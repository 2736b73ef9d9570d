"""Two schemas that both hold, as one."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.errors import ConfigError, short
from .keywords import CHECKED, CONDITION, Nothing, Schema, as_list, canonical, isolated, items_of

MOST_PAIRS = 256  # of alternatives that two schemas have
OBJECT = {"properties", "patternProperties", "additionalProperties"}
ARRAY = {"items", "prefixItems", "additionalItems"}


def merged(a: Any, b: Any, path: str) -> Any:
    """One schema of the values that satisfy both; what ``a`` leaves unevaluated is that of both."""
    b = isolated(b, path)
    if a is True or b is True:
        return b if a is True else a
    if a is False or b is False:
        return False
    for each in (a, b):
        if not isinstance(each, Mapping):
            raise ConfigError(f"{path} of the schema is {short(each)}, which is no schema")
    a, b = ({k: v for k, v in each.items() if k in CHECKED} for each in (a, b))
    if not a or not b:
        return a or b or {}
    if "if" in a and "if" in b:
        condition = {key: b[key] for key in CONDITION if key in b}
        rest = {key: value for key, value in b.items() if key not in CONDITION}
        b = {**rest, "allOf": [*rest.get("allOf", ()), condition]}
    result = {**a, **b}
    for key in a.keys() & b.keys():
        if a[key] != b[key] and key not in OBJECT | ARRAY:
            if key not in MERGE:
                raise ConfigError(f"{path} of the schema has several {key!r} at once: keep one")
            result[key] = MERGE[key](a[key], b[key], path)
    if (a.keys() | b.keys()) & OBJECT:
        result |= _merged_members(a, b, path)
    if a.keys() & ARRAY and b.keys() & ARRAY:
        sides = [items_of(each) for each in (a, b)]
        result["prefixItems"] = [
            conjoined([mine[i] if i < len(mine) else rest for mine, rest in sides])
            for i in range(max(len(mine) for mine, _ in sides))
        ]
        result["items"] = conjoined([rest for _, rest in sides])
    if result.get("type") == []:
        return False
    return result


def _merged_members(a: Schema, b: Schema, path: str) -> dict[str, Any]:
    """Keywords about the members of an object.  A property that only one schema declares is an
    additional property of the other, or follows a pattern of it."""
    properties: dict[str, Any] = {}
    named = [each.get("patternProperties", {}) for each in (a, b)]
    declared = [each.get("properties", {}) for each in (a, b)]
    more = [each.get("additionalProperties", True) for each in (a, b)]
    clash = any(mine and others is not True for mine, others in zip(named, more[::-1], strict=True))
    for name in dict.fromkeys((*declared[0], *declared[1])):
        sides: list[Any] = []
        for mine, patterns, others in zip(declared, named, more, strict=True):
            if name in mine or not patterns:
                sides.append(mine.get(name, others))
            clash |= name not in mine and bool(patterns) and others is not True
        properties[name] = conjoined(sides)
    if clash:
        raise ConfigError(f"{path} of the schema has patternProperties in allOf")
    patterns = {
        pattern: conjoined([each[pattern] for each in named if pattern in each])
        for pattern in (*named[0], *named[1])
    }
    found = {"properties": properties, "patternProperties": patterns,
             "additionalProperties": conjoined(more)}  # fmt: skip
    return {key: value for key, value in found.items() if key in a or key in b}


def conjoined(schemas: Sequence[Any]) -> Any:
    """All of them, merged where they are read."""
    if False in [each for each in schemas if isinstance(each, bool)]:
        return False
    rest = [each for each in schemas if each is not True and each != {}]
    return rest[0] if len(rest) == 1 else {"allOf": rest} if rest else True


def _merged_types(u: Any, v: Any, path: str) -> list[str]:
    mine, other = (
        {*as_list(x)} | ({"integer"} if "number" in as_list(x) else set()) for x in (u, v)
    )
    found = mine & other
    return sorted(found - {"integer"} if "number" in found else found)


def _merged_ways(u: Any, v: Any, path: str) -> list[Any]:
    """Alternatives of both: pairs."""
    if len(u) * len(v) > MOST_PAIRS:
        raise ConfigError(f"{path} of the schema has too many alternatives in allOf")
    return [{"allOf": [x, y]} for x in u for y in v]


def _merged_steps(u: Any, v: Any, path: str) -> Any:
    if int(u) != u or int(v) != v:
        raise ConfigError(f"{path} of the schema has several 'multipleOf' at once")
    return math.lcm(int(u), int(v))


def _strictest(pick: Callable[..., Any]) -> Callable[[Any, Any, str], Any]:
    def merge(u: Any, v: Any, path: str) -> Any:
        if isinstance(u, bool) or isinstance(v, bool):  # as before draft 6
            raise ConfigError(f"{path} of the schema has bounds of two drafts at once")
        return pick(u, v)

    return merge


MERGE: dict[str, Callable[[Any, Any, str], Any]] = {
    "type": _merged_types,
    "required": lambda u, v, path: list(dict.fromkeys((*u, *v))),
    "enum": lambda u, v, path: [x for x in u if canonical(x) in {*map(canonical, v)}],
    "const": lambda u, v, path: u if canonical(u) == canonical(v) else _none(path),
    "pattern": lambda u, v, path: (*as_list(u), *as_list(v)),
    "not": lambda u, v, path: {"anyOf": [u, v]},
    "propertyNames": lambda u, v, path: conjoined([u, v]),
    "uniqueItems": lambda u, v, path: u or v,
    "allOf": lambda u, v, path: [*u, *v],
    "anyOf": _merged_ways, "oneOf": _merged_ways, "multipleOf": _merged_steps,
    "dependentRequired": lambda u, v, path: {
        name: [*u.get(name, ()), *v.get(name, ())] for name in {**u, **v}},
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"),
                    _strictest(max)),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"),
                    _strictest(min)),
}  # fmt: skip


def _none(path: str) -> Any:
    raise Nothing(path)
