"""What users ask for, as plain data that is sent to the worker process and names what was built.

A source is a dictionary of one entry: ``regex`` and an expression, ``choice`` and texts,
``json_schema`` and a schema, ``row`` or ``either`` and sources, ``repeat`` and a source with the
fewest and the most times (None: without end), ``free`` and words that a text does not contain.
Nothing is read here: a source may be hostile, and the worker can be ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from ..core.errors import ConfigError, one_line, short

LONGEST = 1 << 20  # characters of a source

Source = Mapping[str, Any]


def regex(expression: str) -> Source:
    """Texts that match a regular expression as a whole."""
    return {"regex": expression}


def choice(texts: Sequence[str]) -> Source:
    """One of several texts."""
    return {"choice": list(texts)}


def json_schema(schema: Any) -> Source:
    """JSON texts of a schema: a pydantic class, a dictionary or a file."""
    return {"json_schema": schema_of(schema)}


def schema_of(source: Any) -> Mapping[str, Any]:
    """The schema in a pydantic class, a dictionary or a file."""
    if isinstance(source, str | PathLike):
        try:
            with open(source, encoding="utf-8") as file:
                source = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"the schema cannot be read from {short(source)}: {one_line(error)}"
            ) from None
    elif isinstance(source, type):
        source = source.model_json_schema()  # type: ignore[attr-defined]
    if not isinstance(source, Mapping):
        raise ConfigError(f"a JSON schema is an object, not {short(source)}")
    return source


def encoded(source: Source) -> str:
    """A source as JSON; raises `ConfigError` for what JSON has no words for."""
    try:
        text = json.dumps(source, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{named(source)} is not well formed: {one_line(error)}") from None
    if len(text) > LONGEST:
        raise ConfigError(f"{named(source)} has {len(text):,} characters, at most {LONGEST:,}")
    return text


def named(source: Source) -> str:
    """What errors call a source."""
    ((kind, value),) = source.items()
    return {"regex": f"the regex {short(value)}", "json_schema": "the schema",
            "choice": "the choice"}.get(kind, "the structure")  # fmt: skip
