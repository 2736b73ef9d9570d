"""JSON schemas: every text that is allowed satisfies its schema, and what cannot be kept is
refused."""

from __future__ import annotations

import json
import re
from datetime import datetime, time
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Field

from dllm.core.errors import ConfigError
from dllm.structured import regex_pattern, schema_of, schema_pattern
from dllm.structured.automaton import Automaton
from dllm.structured.compiling import compile_tokens, prefix_tree
from dllm.structured.numbers import decimals, integers

from ..thin import some

BYTES = tuple(bytes([i]) for i in range(256))
TREE = prefix_tree(BYTES)


def automaton(pattern: str) -> tuple[Automaton, int]:
    """The automaton of a pattern over single bytes."""
    tables = compile_tokens(pattern, BYTES, TREE)
    return Automaton.ending(tables, [256], 256, 257), tables.start


def texts(pattern: str, count: int, most: int = 160) -> list[str]:
    """Random texts of a pattern, of at most so many bytes beyond the fewest."""
    built, start = automaton(pattern)
    rng, result = np.random.default_rng(0), []
    for _ in range(count):
        state, spelt = start, bytearray()
        left = int(built.need[start]) + int(rng.integers(most))
        while not built.accepting[state] or rng.random() < 0.7:
            follow = built.next[state]
            ways = np.flatnonzero((follow >= 0) & ~built.closed[follow])
            ways = ways[built.need[follow[ways]] < left]
            if not ways.size:
                break
            label = int(rng.choice(ways))
            spelt.append(int(rng.choice(np.flatnonzero(built.of == label))))
            state, left = int(follow[label]), left - 1
        result.append(spelt.decode())
    return result


class Inner(BaseModel):
    kind: Literal["a"]
    size: int = Field(ge=1, le=12)


class Other(BaseModel):
    kind: Literal["b"]
    names: list[str] = Field(min_length=1, max_length=3)


class Model(BaseModel):
    name: str = Field(max_length=8)
    share: float = Field(ge=0, le=1)
    either: Inner | Other = Field(discriminator="kind")
    maybe: int | None = None
    table: dict[str, bool] = {}
    pair: tuple[int, str] = (1, "x")


TREE_SCHEMA = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object", "required": ["value"],
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
        },
    },
}  # fmt: skip
STRINGS = {"type": "string"}
SUPPORTED: list[dict[str, Any]] = [
    {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"},
    {"type": "null"}, {"type": ["string", "null"]}, {"type": ["integer", "number"]},
    {"const": "é\n\"quoted\""}, {"enum": ["a.b", 1, None, True, {"x": [1, 2.5]}, []]},
    {"type": "string", "enum": ["a", "b", 3]},
    {"type": "string", "minLength": 2, "maxLength": 4}, {"type": "string", "minLength": 3},
    {"type": "string", "pattern": "^[a-z]+-[0-9]{2}$"}, {"type": "string", "pattern": "b+"},
    {"type": "string", "pattern": r"^a.\d\w\s[^x]\D\W\S$"},
    {"type": "string", "pattern": r'^say "(yes|no)"\\ \u0041\n$'},
    {"type": "string", "pattern": r"^(?:x|y)$"}, {"pattern": r"^\S+@[\w.\-]+$"},
    *({"type": "string", "format": name} for name in (
        "date", "time", "date-time", "uuid", "email", "ipv4", "hostname", "uri")),
    {"type": "integer", "minimum": 3}, {"type": "integer", "minimum": -12, "maximum": 107},
    {"type": "integer", "exclusiveMinimum": 8, "exclusiveMaximum": 12}, {"maximum": -3},
    {"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "exclusiveMinimum": 0},
    {"type": "number", "minimum": -2, "exclusiveMaximum": 2},
    {"type": "array"}, {"type": "array", "items": STRINGS},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 0},
    {"type": "array", "prefixItems": [{"type": "integer"}, STRINGS], "items": False},
    {"prefixItems": [{"type": "integer"}], "items": {"type": "null"}, "minItems": 1, "maxItems": 4},
    {"type": "array", "items": STRINGS, "maxItems": 1, "uniqueItems": True},
    {"type": "object"}, {"type": "object", "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": STRINGS, "b": {"type": "null"}}},
    {"type": "object", "properties": {"a": STRINGS, "b": {"type": "null"}, "c": {}},
     "required": ["b"], "additionalProperties": False},
    {"properties": {"a": {"type": "object", "properties": {"b": {"const": 1}}, "required": ["b"]}},
     "required": ["a"]},
    {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "boolean"}}]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}]},
    {"oneOf": [{"const": 1}, {"enum": ["x", True]}]},
    {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "integer"}}},
    {"$ref": "#/definitions/a~1b", "definitions": {"a/b": {"type": "null"}}},
    {}, TREE_SCHEMA, Model.model_json_schema(),
    {"title": "t", "description": "d", "default": 1, "examples": [2], "type": "integer"},
]  # fmt: skip


@pytest.mark.parametrize("schema", some(SUPPORTED, 28), ids=lambda schema: json.dumps(schema)[:60])
def test_every_text_satisfies_its_schema(schema: dict[str, Any]) -> None:
    kind = jsonschema.Draft202012Validator
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    written = texts(schema_pattern(schema), 12)
    for text in written:
        value = json.loads(text)
        validator.validate(value)
        if schema.get("format") in ("time", "date-time"):
            {"time": time, "date-time": datetime}[schema["format"]].fromisoformat(value)
    assert len(set(written)) > 1 or len(written[0]) < 30


REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "integer"}}, "'not', which is not supported"),
    ({"type": "integer", "multipleOf": 2}, "'multipleOf'"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "array", "contains": {"type": "null"}}, "'contains'"),
    ({"type": "object", "patternProperties": {"a": {}}}, "'patternProperties'"),
    ({"type": "object", "minProperties": 1}, "'minProperties'"),
    ({"type": "object", "propertyNames": {}}, "'propertyNames'"),
    ({"type": "object", "dependentRequired": {}}, "'dependentRequired'"),
    ({"if": {}, "then": {}}, "'if'"),
    ({"type": "string", "contentEncoding": "base64"}, "'contentEncoding'"),
    ({"type": "string", "format": "iri"}, "the format 'iri'; supported: date"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "cannot be combined"),
    ({"type": "string", "format": "date", "pattern": "a"}, "cannot be combined"),
    ({"type": "string", "pattern": "("}, "not well formed"),
    ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
    ({"type": "string", "pattern": "a^b"}, "in its middle"),
    ({"type": "string", "pattern": "^a|b"}, "in a group"),
    ({"type": "string", "pattern": 3}, "is no text"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "above"),
    ({"type": "string", "minLength": -1}, "no count"),
    ({"type": "string", "minimum": 3}, "'minimum' beside string"),
    ({"type": "strnig"}, "the type 'strnig'"),
    ({"type": "number", "minimum": 0.5}, "bounds of a number are whole"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "no whole number lies between"),
    ({"type": "integer", "minimum": "5"}, "no number"),
    ({"type": "number", "minimum": 2, "exclusiveMaximum": 2}, "no number lies between"),
    ({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "above"),
    ({"prefixItems": [{}], "items": False, "minItems": 2}, "2 items at least"),
    ({"type": "object", "required": ["a"]}, "requires 'a'"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may overlap"),
    ({"oneOf": [{"const": 1}, {"enum": [1.0]}]}, "may overlap"),
    ({"allOf": [{}, {}]}, "several in allOf"),
    ({"anyOf": [{}], "type": "string"}, "'type' beside anyOf"),
    ({"$ref": "other.json"}, "keep it in one file"),
    ({"$ref": "#/$defs/x"}, "which is not there"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "without end"),
    ({"type": "string", "enum": [1]}, "allows no value"),
    ({"enum": []}, "allows no value"),
    ({"properties": {"a": False}}, "allows nothing"),
    ({"properties": [1]}, "not well formed"),
    ({"anyOf": 5}, "not well formed"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda x: json.dumps(x)[:60])
def test_what_cannot_be_kept_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        schema_pattern(schema)
    assert "\n" not in str(caught.value)


def test_where_schemas_come_from(tmp_path: Path) -> None:
    assert schema_of(Inner) == Inner.model_json_schema()
    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}', encoding="utf-8")
    assert schema_of(file) == schema_of(str(file)) == {"type": "null"}
    file.write_text("[1", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read from"):
        schema_of(file)
    with pytest.raises(ConfigError, match="cannot be read from"):
        schema_of("no such file.json")
    file.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="a JSON schema is an object"):
        schema_of(file)


def test_numbers_within_bounds() -> None:
    """Every bound against every number near it."""
    rng = np.random.default_rng(3)
    for _ in range(150):
        low, high = sorted(int(x) for x in rng.integers(-130, 1200, 2))
        above, below = bool(rng.integers(2)), bool(rng.integers(2))
        lower, upper = (None if rng.random() < 0.2 else x for x in (low, high))
        if high - low < 3:
            continue
        whole = re.compile(integers(lower, upper, above, below))
        decimal = re.compile(decimals(lower, upper, above, below))
        near = {low - 1, low, low + 1, high - 1, high, high + 1, 0, -1, 1, 9, 10, 99, 100, 1000}
        for x in (*near, *(int(n) for n in rng.integers(-1500, 1500, 20))):
            inside = (lower is None or x > lower or (x == lower and not above)) and (
                upper is None or x < upper or (x == upper and not below)
            )
            assert bool(whole.fullmatch(str(x))) == inside, (lower, upper, above, below, x)
            assert bool(decimal.fullmatch(str(x))) == inside, (lower, upper, above, below, x)
            y = x + (0.5 if x >= 0 else -0.5)
            between = (lower is None or y > lower) and (upper is None or y < upper)
            assert bool(decimal.fullmatch(str(y))) == between, (lower, upper, above, below, y)


@pytest.mark.parametrize(
    "regex",
    [
        "a.c", "[^a]b", r"\D\W\S", "[[a]", "[a&&b~]+", "(?i:Ab)c", r"\x41\u00e9\n", "^a|b$", "[]a]",
        "(?s:.)", "x{2,3}?y*?", r"\.\*\[", "(?P<n>a|b)+", "[\\]\\-a]", "é[à-ü]", r"\$", r"a\\$",
    ],
)  # fmt: skip
def test_expressions_mean_what_they_mean_in_python(regex: str) -> None:
    for text in texts(regex_pattern(regex), 30, most=6):
        assert re.fullmatch(regex, text, re.ASCII), text
