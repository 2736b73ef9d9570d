"""JSON schemas: every text that is allowed satisfies its schema, and what cannot be kept is
refused."""

import json
import re
from datetime import datetime, time
from typing import Any, Literal

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Field

from dllm.core.errors import ConfigError
from dllm.structured import source
from dllm.structured.automaton import Automaton
from dllm.structured.byte_automaton import Unfit
from dllm.structured.compiling import byte_automaton, compile_tokens, prefix_tree

from ..thin import some

BYTES = tuple(bytes([i]) for i in range(256))
TREE = prefix_tree(BYTES)


def automaton(wanted: source.Source) -> tuple[Automaton, int]:
    """The automaton of a source over single bytes."""
    tables = compile_tokens(wanted, BYTES, TREE)
    return Automaton.ending(tables, [256], 256, 257), tables.start


def texts(wanted: source.Source, count: int, most: int = 160) -> list[str]:
    """Random texts of a source, of at most so many bytes beyond the fewest."""
    built, start = automaton(wanted)
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
OBJECT: dict[str, Any] = {"type": "object", "properties": {
    "a": {"type": ["integer", "string"]}, "b": {"type": "string"}, "c": {"type": "integer"},
}}  # fmt: skip
MANY: dict[str, Any] = {**dict.fromkeys("abcde", STRINGS), "f": {"type": "object"}}
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
        "date", "time", "date-time", "uuid", "email", "ipv4", "hostname", "uri", "regex")),
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
    # Keywords of other types, unknown ones and those of OpenAPI and OpenAI say nothing.
    {"type": "string", "minimum": 3, "x-order": 1, "example": "e", "nullable": True},
    {"type": "object", "strict": True, "propertyOrdering": ["b"], "properties": {"b": STRINGS}},
    {"type": "integer", "format": "int32"}, {"type": "string", "format": "password"},
    # Siblings and parts of allOf hold together.
    {"allOf": [{"type": "object", "properties": {"a": STRINGS}, "required": ["a"]},
               {"properties": {"a": {"minLength": 2}, "b": {"type": "integer"}}}]},
    {"anyOf": [{"minimum": 3}, {"maximum": -3}], "type": "integer"},
    {"$ref": "#/$defs/x", "maxLength": 2, "$defs": {"x": {"type": "string"}}},
    {"allOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"anyOf": [{"const": 2}, {"const": 3}]}]},
    {"properties": {"a": STRINGS}, "additionalProperties": False,
     "anyOf": [{"required": ["a"]}, {"properties": {"a": False}}]},
    {"type": "object", "required": ["a"]},
    {"type": "object", "required": ["a"], "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": STRINGS, "b": STRINGS, "c": STRINGS},
     "dependentRequired": {"a": ["b"]}},
    {"type": "object", "properties": {"a": STRINGS, "b": STRINGS},
     "dependentSchemas": {"a": {"properties": {"b": {"minLength": 2}}, "required": ["b"]}}},
    {"type": "object", "properties": {"a": STRINGS, "b": STRINGS}, "minProperties": 1},
    {"type": "object", "patternProperties": {"^a*+a$": {"type": "null"}}},
    {"type": "object", "properties": {"a": STRINGS, "b": {"type": "string", "pattern": "^a*+a$"}}},
    {"type": "object", "properties": {"a": STRINGS, "b": STRINGS, "c": STRINGS},
     "minProperties": 1, "maxProperties": 2},
    {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2},
    {"propertyNames": {"pattern": r"^\w+$"}, "additionalProperties": {"type": "null"},
     "minProperties": 5, "maxProperties": 300},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {"type": "null"}},
     "additionalProperties": False},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}},
     "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"ab": {"maximum": 9}},
     "patternProperties": {"^a": {"type": "integer"}}, "required": ["ab"]},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]+$", "maxLength": 2}},
    {"type": "string", "pattern": "^[a-z]", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "a", "format": "uuid"},
    {"type": "string", "pattern": "(^a|b$)"}, {"pattern": "^a|b$|^c$", "type": "string"},
    {"type": "string", "enum": ["ab", "b", "abc"], "pattern": "^a", "maxLength": 2},
    {"type": "integer", "multipleOf": 7}, {"type": "number", "multipleOf": 0.25, "maximum": 3},
    {"type": "number", "multipleOf": 2}, {"type": "number", "minimum": -0.35, "maximum": 1.205},
    {"type": "number", "exclusiveMinimum": 0.5, "exclusiveMaximum": 0.62},
    {"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True, "minItems": 1},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
     "items": [STRINGS, {"type": "null"}], "additionalItems": False},
    # What may not hold.
    {"not": {"type": ["string", "object", "array"]}}, {"type": "integer", "not": {"const": 2}},
    {"type": "number", "not": {"type": "integer"}}, {"type": "number", "not": {"minimum": 2}},
    {"type": "object", "not": {"additionalProperties": False}}, {"not": {"const": {}}},
    {"type": "array", "items": {"type": "integer"}, "not": {"items": {"minimum": 2}}},
    {**OBJECT, "not": {"additionalProperties": {"type": "string"}}},
    {**OBJECT, "not": {"not": {"required": ["a"]}}},
    {"oneOf": [{"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
               {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}}]},
    {"not": {"properties": {"a": {"type": ["integer", "string"]}}}},
    {"type": "integer", "not": {"multipleOf": 3}}, {"type": "string", "not": {"pattern": "^a"}},
    {"type": "string", "not": {"enum": ["a", "b"]}}, {"type": "string", "not": {"maxLength": 2}},
    {**OBJECT, "not": {"required": ["a"]}}, {**OBJECT, "not": {"required": ["a", "b"]}},
    {**OBJECT, "not": {"properties": {"a": {"type": "integer"}}}},
    {**OBJECT, "oneOf": [{"required": [name]} for name in "abc"]},
    # Apart by what stands beside the alternatives, or by all parts of one.
    {"type": "object", "required": ["a"], "oneOf": [
        {"properties": {**MANY, "a": {"const": x}}} for x in (1, 2)]},
    {"type": "object", "oneOf": [
        {"properties": MANY, "additionalProperties": False},
        {"allOf": [{"properties": {**MANY, "g": {}}}, {"required": ["g"]}]}]},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 2}]},
    {"oneOf": [{"type": "number", "multipleOf": 2}, {"type": "number", "multipleOf": 3}]},
    {**OBJECT, "if": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
     "then": {"required": ["b"]}},
    {**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["c"]}, "else": {"required": ["b"]}},
    {**OBJECT, "allOf": [
        {"if": {"required": [x]}, "then": {"required": [y]}} for x, y in ("ab", "bc")]},
    *({"type": "string", "format": name} for name in (
        "duration", "ipv6", "uri-reference", "json-pointer")),
]  # fmt: skip


@pytest.mark.parametrize("schema", some(SUPPORTED, 28), ids=lambda schema: json.dumps(schema)[:60])
def test_every_text_satisfies_its_schema(schema: dict[str, Any]) -> None:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    written = texts(source.json_schema(schema), 12)
    for text in written:
        if re.search("[0-9]{16}", text):
            continue  # more digits than a float has
        value = json.loads(text)
        validator.validate(value)
        if schema.get("format") in ("time", "date-time"):
            {"time": time, "date-time": datetime}[schema["format"]].fromisoformat(value)
    assert len(set(written)) > 1 or len(written[0]) < 30


REFUSED: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "# of the schema has 'uniqueItems'"),
    ({"properties": {"a": {"type": "array", "contains": {"type": "null"}}}},
     "#/properties/a of the schema has 'contains', which is not supported: describe all items"),
    ({"type": "string", "pattern": "("}, "not well formed"),
    ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
    ({"type": "string", "pattern": "(?m)^a(?=b).$"}, "with the flag m"),
    ({"type": "string", "pattern": "(a(?=b)b)*"}, "look-around"),
    ({"type": "string", "pattern": "a^b"}, "in its middle"),
    ({"type": "string", "pattern": 3}, "is no text"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "allows no value"),
    ({"type": "string", "minLength": -1}, "no count"),
    ({"type": "string", "maxLength": 1e999}, "has minLength or maxLength that is no count"),
    ({"enum": [1e999]}, "not well formed"), ({"maximum": 1e999}, "a bound that is no number"),
    ({"type": "strnig"}, "the type 'strnig'"),
    ({"type": "integer", "minimum": 5, "maximum": 4}, "allows no value"),
    ({"type": "integer", "minimum": "5"}, "no number"),
    ({"type": "number", "multipleOf": 0}, "no positive number"),
    ({"type": "number", "multipleOf": 1.2345678}, "too fine"),
    ({"type": "number", "minimum": 2, "exclusiveMaximum": 2}, "allows no value"),
    ({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "no value"),
    ({"prefixItems": [{}], "items": False, "minItems": 2}, "allows no value"),
    ({"type": "object", "required": "a"}, "no list of names"),
    ({"enum": "ab"}, "'enum' that is no list"),
    ({"allOf": [{"patternProperties": {"^a": {}}}, {"additionalProperties": False}]},
     "patternProperties in allOf"),
    ({"type": "object", "minProperties": 7}, "a minProperties of 7, which is supported up to 6"),
    ({"type": "array", "prefixItems": {}}, "'prefixItems' that is no list"),
    ({"oneOf": [{"const": 1}, {"enum": [1.0]}]}, "allows no value"),
    ({"type": "string", "not": {"format": "email"}}, "the format 'email' from holding"),
    ({"type": "string", "not": {"pattern": "[^\\w]"}}, "a set that may not hold"),
    ({"not": {}}, "allows no value"), ({"not": {"maxProperties": 1}}, "maxProperties from holding"),
    ({"not": {"const": {"a": 1, "b": 2}}}, "an object from holding"),
    ({"type": "array", "not": {"items": {"enum": [*range(7)]}, "uniqueItems": True}},
     "uniqueItems from holding"),
    ({"type": "object", "not": {"additionalProperties": {"const": 1}}}, "values of names"),
    ({"$ref": "other.json"}, "keep it in one file"),
    ({"$ref": "#/$defs/x"}, "which is not there"),
    ({"$ref": "x", "$defs": {"a": {"$id": "x", "const": 1}, "b": {"$id": "x"}}}, "in one file"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "without end"),
    ({"type": "string", "enum": [1]}, "allows no value"),
    ({"enum": []}, "allows no value"),
    ({"properties": {"a": False}, "required": ["a"]}, "allows no value"),
    ({"properties": [1]}, "not well formed"),
    ({"anyOf": 5}, "not well formed"),
    # Also where something else is too large unless it is written with less.
    ({"properties": {"a": {"items": {}, "maxItems": 10**9}, "b": {"contains": {}}}},
     "#/properties/b of the schema has 'contains'"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda x: json.dumps(x)[:60])
def test_what_cannot_be_kept_is_refused(schema: Any, message: str) -> None:
    with pytest.raises((ConfigError, Unfit), match=re.escape(message)) as caught:
        source.encoded(source.json_schema(schema))
        byte_automaton(source.json_schema(schema))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"const": 1.0}, ["1", "1.0"], ["1.5"]),
        ({"enum": [6.0, 7], "multipleOf": 2}, ["6"], ["7"]),
        ({"oneOf": [{"const": [1]}, {"const": [1.0]}, {"const": 2}]}, ["2"], ["[1]", "[1.0]"]),
        # A reader chooses an alternative by its tag, which has a default.
        ({"oneOf": [{"type": "object", "properties": {"kind": {"const": x, "default": x}}}
                    for x in "ab"], "discriminator": {"propertyName": "kind"}},
         ['{"kind": "a"}', '{"kind": "b"}'], ["{}"]),
        # Numbers that a float rounds are compared with the float.
        ({"const": 1e23}, [str(int(1e23)), f"1{'0' * 23}.0"], [f"1{'0' * 23}"]),
        ({"type": "integer", "maximum": 2.0**64}, [str(2**64)], [str(2**64 + 1)]),
        ({"exclusiveMaximum": 1, "minimum": 0}, ["0.9999999999999999"], [f"0.{'9' * 20}", "1"]),
        ({"exclusiveMinimum": -0.5}, ["-0.49999999999999994", "-0"], [f"-0.4{'9' * 30}", "-0.5"]),
        ({"items": {"enum": [1, 1.0, 2]}, "uniqueItems": True}, ["[2, 1]"], ["[1, 1.0]"]),
        ({"type": "object", "propertyNames": False}, ["{}"], ['{"a": 1}']),
        ({"type": "object", "propertyNames": {"enum": ["a", "b", 3]}, "minProperties": 2},
         ['{"a": 1, "b": 1}'], ['{"a": 1, "a": 1}', '{"a": 1}']),
        # What some readers of a format do not take is not written.
        ({"format": "hostname"}, ['"a-b.c--d"', f'"{"y" * 63}"'],
         ['"xn--a"', f'"{"y" * 64}"', '"a-"', '"a--"', f'"{"a" * 60}{".bcd" * 50}"']),
        ({"format": "email"}, ['"a.b@c-d.org"', f'"{"a" * 64}@b.{"c" * 22}.d.org"'],
         ['"a@b"', '"a@b.1"', '"a@xn--b.org"', f'"{"a" * 65}@b.org"', f'"a@{"b." * 99}org"']),
        ({"format": "uri-template"}, ['"/{?a.b*,c:9}"'], ['"{.*}"', '"{a.}"', '"{a..b}"']),
        ({"format": "uuid4"}, ['"12345678-1234-4234-a234-123456789abc"'],
         ['"12345678-1234-5234-a234-123456789abc"', '"12345678-1234-4234-c234-123456789abc"']),
        ({"format": "regex"}, [json.dumps(r"^(?:[\w.-]+|\d{3}\.)*$")], ['"(a"', '"*"', '"[b-a]"']),
        ({"format": "relative-json-pointer"}, ['"10/a"', '"0#"'], ['"01"', '"401"']),
        ({"properties": {"ab": True}, "patternProperties": {"b$": {"const": 1}}},
         ["{}", '{"ab": 1}'], ['{"ab": 2}']),
        ({"multipleOf": 3}, ["6", "-9007199254740993"], ["7", "595853630546966988.00"]),
        ({"type": "object", "not": {"required": ["a"]}}, ["{}", '{"b": 1, "b": 2}'],
         ['{"a": 1}', '{"a": 1, "a": 2}']),
        # Of names that are written twice the last one counts.
        ({"type": "object", "not": {"properties": {"a": {"type": "integer"}}}},
         ['{"a": "x"}', '{"a": 1, "a": "x"}'], ['{"a": 1}', '{"a": "x", "a": 1}']),
        ({"type": "object", "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
         ['{"a": 2}', '{"b": 3, "b": 2, "a": 2}'], ['{"a": 2, "a": 1}', '{"b": 2, "a": 1}']),
        ({"oneOf": [{"type": "object"}, {"properties": {"x": {"required": ["a"], "properties": {
            "a": {"const": 1}}}}}]}, ['{"x": {"a": 2}}'], ['{"x": {"a": 2, "a": 1}}', "{}"]),
        # So many names differ; one more may stand twice, which a reader drops.
        ({"type": "object", "additionalProperties": {"const": 1}, "minProperties": 2},
         ['{"a": 1, "b": 1}', '{"a": 1, "b": 1, "a": 1}'], ['{"a": 1}', '{"a": 1, "a": 1}']),
        ({"type": "object", "patternProperties": {"^a": {"const": 1}, "b$": {"const": 2}},
          "minProperties": 3, "maxProperties": 3, "additionalProperties": False},
         ['{"a": 1, "b": 2, "ac": 1}'], ['{"a": 1, "b": 2, "b": 2}', '{"a": 1, "b": 2}']),
        ({"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},
         [f'"http://x/{"y" * 150}"'], ['""', '"x y"']),
        # A format says to some readers nothing: what may not hold is kept from all of them.
        ({"oneOf": [{"properties": {name: {"type": "string", "format": "date"}}, "required": [name]}
                    for name in "ab"]},
         ['{"a": "2024-01-01"}', '{"b": "2024-01-01"}'], ['{"a": "x"}', "{}"]),
        ({"type": ["string", "integer"],
          "not": {"type": "string", "format": "date", "minLength": 2}},
         ["3", '"a"'], ['"2024-01-01"', '"ab"']),
        # Properties that others ask for, declared or not.
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, ['{"c": 1}', '{"a": 1, "b": 2}'],
         ['{"a": 1}']),
        ({"type": "object", "dependentSchemas": {"a": {"type": "array"}}}, ["{}"], ['{"a": 1}']),
        ({"type": "object", "properties": {"a": {}}, "dependentSchemas": {
            "a": {"properties": {"b": {}}}, "b": {"required": ["c"]}, "z": False}},
         ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}'], ['{"a": 1, "b": 2}']),
        ({"required": ["a"], "dependentRequired": {"a": ["b"]}}, ['{"a": 1, "b": 2}'],
         ['{"a": 1}']),
        ({"type": "string", "maxLength": 1000}, [f'"{"é" * 1000}"'], [f'"{"a" * 1001}"']),
        ({"items": {"const": 1}, "minItems": 2, "maxItems": 700}, [f"[1{',1' * 699}]"], ["[1]"]),
        # What is too large with all that a bound allows is written with fewer.
        ({"items": {"const": 1}, "maxItems": 10**9}, [f"[1{',1' * 63}]"], [f"[1{',1' * 64}]"]),
        pytest.param({"type": "string", "maxLength": 5000}, [f'"{"a" * 1024}"'],
                     [f'"{"a" * 1025}"'], marks=pytest.mark.slow),
        # A hyphen behind a set stands for itself, as in JavaScript and Java.
        ({"type": "string", "pattern": r"^[\w-\.]+@([\w-]+\.)+[\w-]{2,4}$"}, ['"a-b.c@x-y.org"'],
         ['"a b@c.org"', '"a+b@c.org"']),
        ({"type": "string", "pattern": r"^\d-[\p{L}-_][\\w-z]$"}, ['"1-_z"', '"1--\\\\"'],
         ['"1-^z"', '"1-_-"', '"1z_z"']),
        # Beyond the basic plane, as AWS writes it.
        ({"type": "string", "pattern": r"^[\u0020-\uD7FF\uD800\uDC00-\uDBFF\uDFFF]$"},
         ['"a"', '"\U0001f600"', '"\U0010ffff"'], ['"\\t"', '"aa"', '"\ue000"']),
        # Names of buckets; what may stand around them takes too many states.
        ({"type": "string", "pattern": "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"},
         ['"a-b"', '"a.b.c9"'], ['"-ab"', '"ab"', f'"{"a" * 64}"']),
        ({"prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": 3}, "minItems": 1,
          "maxItems": 4}, ["[1]", "[1, 2]", "[1, 2, 3, 3]"], ["[]", "[1, 3]", "[1, 2, 3, 3, 3]"]),
        # Items of two schemas, one of which names the first ones.
        ({"allOf": [{"prefixItems": [{"type": "integer"}]}, {"items": {"enum": [5, 6, "a"]}}]},
         ["[]", "[5]", '[6, "a"]'], ["[4]", '["a"]', "[5, 4]"]),
        ({"allOf": [{"items": [{"enum": [1, 2]}], "additionalItems": False},
                    {"items": [{"enum": [2, 3]}, {}]}]}, ["[]", "[2]"], ["[1]", "[3]", "[2, 2]"]),
        # Of many constants that differ, each is written before those behind it.
        ({"items": {"enum": [*"abcdefgh"]}, "uniqueItems": True, "minItems": 2, "maxItems": 3},
         ['["a", "c"]', '["a","b","h"]'], ['["a"]', '["a","a"]', '["a","b","c","d"]']),
        # Items of which there are few, and those of constants that the rest of their schema allows.
        ({"items": {"anyOf": [{"const": "a"}, {"type": "integer", "minimum": 9, "maximum": 11}]},
          "uniqueItems": True, "minItems": 2}, ['[11, "a", 9]', "[9,10]"], ["[9, 9]", "[12, 9]"]),
        ({"items": {"enum": ["a", "bb", 1], "type": "string", "maxLength": 1}, "uniqueItems": True},
         ["[]", '["a"]'], ["[1]", '["bb"]']),
        ({"items": {"type": "boolean", "not": {"const": True}}, "uniqueItems": True},
         ["[]", "[false]"], ["[true]", "[false, false]"]),
        ({"items": False, "uniqueItems": True}, ["[]"], ["[1]"]),
        # What several parts name, and each level of what is nested, does not contain itself.
        ({"$ref": "#/$defs/a", "$defs": {
            "x": {"required": ["v"], "properties": {"v": {"const": 1}}},
            **{k: {"allOf": [{"$ref": "#/$defs/x"}]} for k in "defg"},
            "a": {"allOf": [{"$ref": f"#/$defs/{k}"} for k in "defg"]}}},
         ['{"v": 1}'], ["{}"]),
        ({"$ref": "#/$defs/0", "$defs": {"x": {"type": "object"}, **{str(i): {"allOf": [
            {"$ref": "#/$defs/x"}, {"properties": {"n": {"$ref": f"#/$defs/{i + 1}"}}}]}
            for i in range(4)}, "4": {"const": 1}}},
         ['{"n": {"n": {"n": {"n": 1}}}}'], ['{"n": 1}']),
        ({"type": "integer", "minimum": 10**400}, ["1" * 401], ["1" * 400]),
        # A part with an $id is the root of references within it.
        ({"$ref": "#/$defs/a", "$defs": {"c": {"const": 1}, "a": {
            "$id": "http://x/a", "items": {"$ref": "#/$defs/c"}, "$defs": {"c": {"const": 2}}}}},
         ["[2]"], ["[1]"]),
        ({"const": {"$id": "x", "a": {"$ref": "#"}}}, ['{"$id": "x", "a": {"$ref": "#"}}'], ["{}"]),
        # Parts that others name by their $id or an anchor, as TypeBox and bundles of files have.
        ({"$defs": {"T": {"$id": "T", "properties": {"a": {"type": "array", "maxItems": 1,
                                                           "items": {"$ref": "T"}}}}}, "$ref": "T"},
         ['{"a": [{"a": []}]}'], ['{"a": [1]}']),
        ({"$id": "http://x/a/b.json", "prefixItems": [{"$ref": "c.json#/$defs/d"}, {"$ref": "#e"},
                                                      {"$ref": "/f#"}],
          "$defs": {"c": {"$id": "c.json", "$defs": {"d": {"const": 1}}},
                    "e": {"$anchor": "e", "const": 2}, "f": {"$id": "../f", "const": 3}}},
         ["[1, 2, 3]"], ["[1, 1]", "[2]", "[1, 2, 2]"]),
        # What pydantic writes for a Decimal, and zod for an address.
        ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d{0,3}\.?\d{0,2}0*$"},
         ['"12.50"', '"+007."'], ['""', '"-."', '"123456"', '"1.234"']),
        ({"type": "string", "format": "email", "pattern":
          r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9]+\.)+[A-Za-z]{2,}$"},
         ['"a.b@c.org"'], ['".a@c.org"', '"a..b@c.org"']),
        ({"type": "string", "pattern": "(?=.*[A-Z])(?=.*[0-9]).{3}"}, ['"1bA"'], ['"1A"', '"abA"']),
        # Look-ahead behind the start: a duration of zod's, a bank's code of valibot's.
        ({"type": "string", "pattern":
          r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+D)?(T(?=\d)(\d+H)?(\d+S)?)?)$"},
         ['"P2W"', '"P1Y2DT3S"', '"PT4H"'], ['"P"', '"PT"', '"P1YT"', '"P1Y2W"']),
        ({"type": "string", "pattern": r"^[A-Z]{2}(?!00)[\dA-Z]{2}(?:\d{2})?$"},
         ['"AB01"', '"ABC034"'], ['"AB00"', '"AB0012"', '"AB0"']),
        ({"type": "string", "pattern": r"a(?:(?=b.)[bc]+|d)$"}, ['"xabc"', '"ad"'],
         ['"ab"', '"ac"', '"abcx"']),
        # Characters of other alphabets are letters to some readers; a break may end a line.
        ({"type": "string", "not": {"pattern": r"^\w+$"}}, ['"a b"'], ['"é"', '"a\\n"']),
        ({"type": "object", "properties": {"é": {}}, "patternProperties": {r"^\w$": {"const": 1}}},
         ['{"é": 1}'], ['{"é": 2}']),
        ({"type": "object", "patternProperties": {r"^\S$": {"const": 1}}},
         ['{"a": 1}', '{" ": 2}'], ['{"é": 2}', '{"a": 2}']),
        # Names that are empty, or have a slash.
        ({"$ref": "#/$defs//a~1b/", "$defs": {"": {"a/b": {"": {"const": 1}}}}}, ["1"], ["2"]),
    ],
)  # fmt: skip
def test_which_texts_a_schema_has(schema: Any, taken: list[str], refused: list[str]) -> None:
    found = byte_automaton(source.json_schema(schema))[0]
    assert all(found.accepts(text.encode()) for text in taken)
    assert not any(found.accepts(text.encode()) for text in refused)
