"""Where structures come from."""

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from dllm.core.errors import ConfigError
from dllm.structured import source
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
