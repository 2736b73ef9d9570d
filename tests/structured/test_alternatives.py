"""Alternatives of ``oneOf`` that are told apart by a tag."""

import json
from typing import Any

import pytest

from dllm.core.errors import ConfigError
from dllm.structured import source
from dllm.structured.compiling import byte_automaton

TAGS: list[dict[str, Any]] = [
    {"properties": {"a": {"const": x}, "b": {}}, "required": ["a"]} for x in (1, 2)
]
MANY: list[dict[str, Any]] = [
    {"properties": {"a": {"const": i}, **{f"{i}{x}": {"type": "string"} for x in "abc"}},
     "required": ["a"]}
    for i in range(1, 9)
]  # fmt: skip


@pytest.mark.parametrize("schemas", [
    TAGS, [each | {"type": ["object", "null"]} for each in TAGS], MANY,
], ids=["untyped", "nullable", "many"])  # fmt: skip
def test_only_one_may_hold(schemas: list[dict[str, Any]]) -> None:
    """``null`` is of both nullable ones, and was written; of many each was once taken from each."""
    found = byte_automaton(source.json_schema({"oneOf": schemas}))[0]
    assert all(found.accepts(text) for text in (b'{"a": 1}', b'{"a": 2}'))
    assert not any(found.accepts(text) for text in (b"null", b"3", b'{"a": 9}', b'{"b": 1}'))


def test_what_one_needs_and_the_other_does_not_declare_tells_them_apart() -> None:
    """As in GitHub's descriptions of owners; with over 6 required properties they were refused."""
    ways = [
        {"type": "object", "properties": {name: {"type": "integer"} for name in names},
         "required": [*names]}
        for names in ("abcdefg", "abcdxyz")
    ]  # fmt: skip
    for schema in ({"oneOf": ways}, {"oneOf": ways, "properties": {"q": {"type": "integer"}}}):
        found = byte_automaton(source.json_schema(schema))[0]
        for names in ("abcdefg", "abcdxyz"):
            assert found.accepts(json.dumps(dict.fromkeys(names, 1)).encode())
        assert not found.accepts(json.dumps(dict.fromkeys("abcdefgxyz", 1)).encode())
    beside = byte_automaton(source.json_schema({"oneOf": [
        {"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]},
    ], "properties": {"b": {"type": "integer"}}}))[0]  # fmt: skip
    assert beside.accepts(b'{"a": 1}') and not beside.accepts(b'{"a": 1,"b": 2}')


def test_unions_within_a_union_are_told_apart() -> None:
    """As pydantic writes a discriminator within another; what leads back ends."""
    more = {name: {"type": "string"} for name in "stuvwx"}
    cats, dog = (
        [{"properties": {"pet": {"const": pet}, "color": {"const": color}, **more},
          "type": "object", "required": ["pet", "color", *more]} for color in ("black", "white")]
        for pet in ("cat", "dog")
    )  # fmt: skip
    found = byte_automaton(source.json_schema({"oneOf": [{"oneOf": cats}, dog[0]]}))[0]
    for pet, color, taken in (("cat", "white", True), ("dog", "black", True), ("dog", "x", False)):
        value = {"pet": pet, "color": color, **dict.fromkeys(more, "")}
        assert found.accepts(json.dumps(value).encode()) == taken
    chain = [{"properties": {"next": {"anyOf": [{"$ref": f"#/oneOf/{i}"}, {"const": i}]}},
              "type": "object", "required": ["next"]} for i in range(2)]  # fmt: skip
    with pytest.raises(ConfigError, match="has to keep"):
        byte_automaton(source.json_schema({"oneOf": chain}))
