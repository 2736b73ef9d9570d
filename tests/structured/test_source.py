"""Where structures come from."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from dllm.core.errors import ConfigError
from dllm.structured import compiling, reading, source
from dllm.structured.compiling import byte_automaton


class Inner(BaseModel):
    size: int


def test_where_schemas_come_from(tmp_path: Path) -> None:
    schema_of = source.schema_of
    without_end = {"type": "number", "default": 1e999}  # what pydantic writes
    assert byte_automaton(json.loads(source.encoded(source.json_schema(without_end))))
    assert schema_of(Inner) == Inner.model_json_schema()
    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}', encoding="utf-8-sig")  # as programs on Windows do
    assert schema_of(file) == schema_of(str(file)) == {"type": "null"}
    file.write_text("[1", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read from"):
        schema_of(file)
    with pytest.raises(ConfigError, match="cannot be read from"):
        schema_of("no such file.json")
    file.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="a JSON schema is an object"):
        schema_of(file)
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(ConfigError, match="is no JSON or too deep"):
        source.encoded(source.json_schema(deep))


def test_what_is_too_large_is_written_less_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """What contains itself, also where reading it is too much, and values of any kind; what a
    reference stands for that leads to no other is not left out."""
    names = {f"a{i}": {"$ref": f"#/$defs/{i}"} for i in range(4)}
    node = {"type": "object", "required": ["x"], "properties": {"x": {"type": "null"}, **names}}
    schema: dict[str, Any] = {"$ref": "#/$defs/0", "$defs": dict.fromkeys("0123", node)}
    monkeypatch.setattr(reading, "MOST_PARTS", 500)
    found = byte_automaton({"json_schema": schema})[0]
    assert found.accepts(b'{"x": null, "a1": {"x": null}}')
    inner = {"type": "object", "properties": {"y": {"type": "null"}}}
    schema = {"properties": {"a": {"$ref": "#/$defs/b"}, "c": {}}, "$defs": {"b": inner}}
    monkeypatch.setattr(compiling, "MOST_STATES", 100)
    found = byte_automaton({"json_schema": schema | {"type": "object"}})[0]
    assert found.accepts(b'{"a": {"y": null}, "c": 1}') and not found.accepts(b'{"c": []}')


def test_unknown_keywords_are_ignored_and_told() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null", "minimun": 3}}, "x-a": 1}
    assert byte_automaton({"json_schema": schema})[1] == ["minimun"]
    parts = {"schemas": {"a": {"type": "null"}}}  # as OpenAPI has them
    schema = {"$ref": "#/components/schemas/a", "components": parts}
    assert byte_automaton({"json_schema": schema})[1] == []
    schema = {"anyOf": [{"type": "string", "format": f} for f in ("ipv4network", "uuid4")]}
    assert byte_automaton({"json_schema": schema})[1] == ["format 'ipv4network'"]


A, B = ({"properties": {name: {"const": 1}}, "required": [name]} for name in "ab")
CLOSED = {"type": "object", "unevaluatedProperties": False}


@pytest.mark.parametrize("parts", [
    {"allOf": [A, B]}, {**A, "$ref": "#/$defs/b"}, {"allOf": [{"anyOf": [A]}, B]},
    {**B, "if": A, "else": False}, {"dependentSchemas": {"b": A}, **B},
])  # fmt: skip
def test_unevaluated_properties_are_those_of_no_part(parts: dict[str, Any]) -> None:
    """As TypeBox writes an intersection, and zod for draft 2019-09."""
    schema = {**CLOSED, **parts, "$defs": {"b": B}}
    found = byte_automaton({"open_schema": schema})[0]
    assert found.accepts(b'{"a":1,"b":1}')
    assert not found.accepts(b'{"a":1,"b":1,"c":1}')
    inner = byte_automaton({"json_schema": {"allOf": [{**A, **CLOSED}, {"type": "object"}]}})[0]
    assert inner.accepts(b'{"a":1}')
    assert not inner.accepts(b'{"a":1,"b":1}')
    for outer in ({"allOf": [schema, A]}, {"not": schema}):
        with pytest.raises(ConfigError, match="'unevaluatedProperties' beside"):
            byte_automaton({"json_schema": outer})


def test_before_2019_a_reference_is_not_closed_by_what_stands_beside_it() -> None:
    """protoc-gen-jsonschema closes each message so: of nested ones ``{}`` was written alone."""
    part = {"properties": {"b": {"type": "null"}}}
    near = {"a": {"$ref": "#/definitions/x", "additionalProperties": False}}
    schema: dict[str, Any] = {"properties": near, "definitions": {"x": part}}
    for draft, taken in (("draft-04/schema#", True), ("draft/2020-12/schema", False)):
        schema["$schema"] = f"http://json-schema.org/{draft}"
        assert byte_automaton({"json_schema": schema})[0].accepts(b'{"a": {"b": null}}') == taken
