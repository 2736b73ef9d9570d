"""Objects of JSON schemas: which properties are required, and in which order they stand."""

import json
from typing import Any

import jsonschema
import numpy as np

from dllm.structured import source
from dllm.structured.compiling import byte_automaton

from .test_schema import STRINGS, texts


def test_properties_say_themselves_that_they_are_required() -> None:
    """As before draft 4."""
    inner = {"type": "object", "required": True, "properties": {"b": {"type": "null"}}}
    schema = {"properties": {"a": inner, "c": {"enum": [1], "required": True}, "d": {"enum": [2]}}}
    for text in texts(source.json_schema(schema), 8):
        value = json.loads(text)
        assert {"a", "c"} <= value.keys()
        jsonschema.Draft3Validator(schema).validate(value)


def test_extra_keys_stand_in_any_order() -> None:
    """What jsonschema takes of small objects, and nothing else; names that stand twice are left
    out, which a parser makes one of."""
    rng = np.random.default_rng(0)
    for _ in range(8):
        names = [f"k{i}" for i in range(int(rng.integers(1, 6)))]
        schema: dict[str, Any] = {
            "type": "object", "properties": {n: {"type": "integer"} for n in names},
            "required": [n for n in names if rng.random() < 0.5],
            "additionalProperties": {"type": ["boolean", "string"][: int(rng.integers(1, 3))]},
            "maxProperties": int(rng.integers(5, 9)),
        }  # fmt: skip
        found = byte_automaton(source.json_schema(schema, extra_keys=True))[0]
        for _ in range(60):
            keys = rng.permutation([n for n in (*names, "other", "k0x") if rng.random() < 0.7])
            value = {str(k): [1, True, "x"][int(rng.choice(3, p=[0.7, 0.2, 0.1]))] for k in keys}
            right = jsonschema.Draft202012Validator(schema).is_valid(value)
            order = [k for k in value if k in schema["required"]]
            if len(schema["required"]) > 3 and order != sorted(order):
                continue  # of so many, the order is their own
            assert found.accepts(json.dumps(value).encode()) == right, (schema, value)
    schema = {"type": "object", "minProperties": 2, "properties": {"a": STRINGS, "b": STRINGS}}
    found = byte_automaton(source.json_schema(schema, extra_keys=True))[0]
    assert not found.accepts(b'{"a":"x","a":"y"}') and found.accepts(b'{"a":"x","b":"y"}')
