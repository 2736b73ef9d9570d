"""What users ask for, as plain data that is sent to the worker process and names what was built.

A source is a dictionary of one entry: ``regex`` and an expression, ``choice`` and texts,
``grammar`` and its rules, ``json_schema`` or ``open_schema`` and a schema, ``row`` or ``either``
and sources, ``repeat`` and a source with the fewest and the most times (None: without end), and
``free`` and words that a text does not contain.
Nothing is read here: a source may be hostile, and the worker can be ended.
"""

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


def grammar(rules: str) -> Source:
    """Texts of a grammar in the syntax of Lark or of GBNF."""
    return {"grammar": rules}


def json_schema(schema: Any, extra_keys: bool = False) -> Source:
    """JSON texts of a schema: a pydantic class, a dictionary or a file.  ``extra_keys``: with
    undeclared keys, and keys in any order."""
    return {"open_schema" if extra_keys else "json_schema": schema_of(schema)}


def structural_tag(wanted: Mapping[str, Any]) -> Source:
    """Free text in which each of the ``triggers`` begins one of the ``structures``, any number of
    times: what stands between its ``begin`` and its ``end`` is JSON of its ``schema``."""
    structures, triggers = wanted.get("structures"), wanted.get("triggers")
    if not isinstance(structures, list | tuple) or not isinstance(triggers, list | tuple):
        raise ConfigError("structural_tag is a dictionary with lists of structures and triggers")
    if not structures or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise ConfigError("structural_tag has one structure and one trigger, a text, or more")
    tags: list[Source] = []
    for i, each in enumerate(structures):
        keys = ("begin", "end")
        if not isinstance(each, Mapping) or not all(isinstance(each.get(k), str) for k in keys):
            raise ConfigError(f"structures[{i}] of structural_tag has no texts as begin and end")
        if not each["begin"].startswith(tuple(triggers)):
            raise ConfigError(
                f"structures[{i}] of structural_tag begins with {short(each['begin'])}, and with "
                "none of the triggers"
            )
        inner = json_schema({} if each.get("schema") is None else each["schema"])
        tags.append({"row": [choice([each["begin"]]), inner, choice([each["end"]])]})
    free: Source = {"free": list(triggers)}
    return {"row": [free, {"repeat": [{"row": [{"either": tags}, free]}, 0, None]}]}


def schema_of(source: Any) -> Mapping[str, Any]:
    """The schema in a pydantic class, a dictionary or a file."""
    if isinstance(source, str | PathLike):
        try:
            with open(source, encoding="utf-8-sig") as file:
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
        text = json.dumps(source)  # also a default that is infinite
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{named(source)} is no JSON or too deep ({one_line(error)}): use plain data, nest less"
        ) from None
    if len(text) > LONGEST:
        raise ConfigError(f"{named(source)} has {len(text):,} characters, at most {LONGEST:,}")
    return text


def named(source: Source) -> str:
    """What errors call a source."""
    ((kind, value),) = source.items()
    if kind == "regex":
        return f"the regex {short(value)}"
    if kind in ("choice", "grammar"):
        return f"the {kind}"
    return "the schema" if kind.endswith("schema") else "the structure"
