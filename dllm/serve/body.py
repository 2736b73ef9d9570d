"""What bodies of requests are made of: pydantic models whose errors name the field to blame, say
what it must be, and suggest the one that was meant."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError, core_schema

from ..core.errors import UnknownNameError
from .problems import Problem, shortened
from .wire import parameters
from .words import elsewhere, wire_names

LONGEST_PATH = 80  # characters of the name of a field
UNFIT, UNKNOWN, UNSUPPORTED = "unfit", "unknown", "unsupported_value"
Refusals = dict[str, tuple[str, tuple[Any, ...]]]  # field: the reason, harmless values


@dataclass(frozen=True, eq=False)
class Must:
    """Annotation of a field: what its value must be, and whether one is."""

    text: str
    will_do: Callable[[Any], bool]
    schema: Mapping[str, Any] = field(default_factory=dict)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**self.schema, "description": self.text}

    def _check(self, value: Any) -> Any:
        if not self.will_do(value):
            raise PydanticCustomError(UNFIT, "{text}", {"text": self.text})
        return value


class Body(BaseModel):
    """A body or a part of one: values have the types of JSON, and null is not given.  Other fields
    are refused, or ignored where the part is not ``STRICT``."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    STRICT: ClassVar[bool] = True
    TAKES: ClassVar[Collection[str]] = ()  # parameters of `GenerationConfig` beside the fields
    REFUSED: ClassVar[Refusals] = {}
    _how: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.own()
        given = {k: v for k, v in data.items() if v is not None}
        unknown = next((k for k in given if k not in known), None) if cls.STRICT else None
        if unknown is not None:  # the first one: there may be a hundred thousand
            raise PydanticCustomError(UNKNOWN, "{name}", {"name": unknown})
        return given

    @classmethod
    @cache
    def own(cls) -> frozenset[str]:
        """Names of the fields in a body."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def read(cls, data: Any) -> Self:
        """The body in ``data``, parsed JSON; `Problem` for what is wrong with it."""
        if not isinstance(data, dict):
            raise Problem(400, "the body must be a JSON object", code="invalid_body")
        if not is_unicode(data):
            name = next(name for name, value in data.items() if not is_unicode([name, value]))
            raise Problem(
                400, f"{ascii(name)[:80]} is not valid Unicode: it has half a surrogate",
                name.encode(errors="replace").decode()[:80], "invalid_value",
            )  # fmt: skip
        names = cls.taken()
        for name in data.keys() & cls.REFUSED.keys():
            reason, harmless = cls.REFUSED[name]
            if not _is_among(data[name], (None, *harmless)):
                text = f"{name}={shortened(data[name])} is not supported: {reason}"
                raise Problem(400, text, name, UNSUPPORTED)
        fields = {k: v for k, v in data.items() if k not in names and k not in cls.REFUSED}
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise _problem(cls, error, data) from None
        sent = {k: v for k, v in data.items() if k in names and v is not None}
        body._how = parameters(sent, names)
        return body

    @classmethod
    @cache
    def taken(cls) -> dict[str, str]:
        """Name in the body -> parameter, of those that are no fields."""
        every, own = wire_names(tuple(cls.TAKES)), cls.own() | cls.REFUSED.keys()
        return {there: name for there, name in every.items() if there not in own}

    @property
    def how(self) -> dict[str, Any]:
        """Those of `GenerationConfig` that were sent, checked."""
        return dict(self._how)

    def value(self, name: str) -> Any:
        """What was sent as ``name``, a field or a parameter."""
        known = self.taken()
        return self._how.get(known[name]) if name in known else getattr(self, name)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that have a value."""
        return {name: getattr(self, name) for name in self.model_fields_set}


def _is_among(value: Any, harmless: Collection[Any]) -> bool:
    """Whether a JSON value is one of some: 1.0 is 1, and true is not."""
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
    )


def is_unicode(value: Any) -> bool:
    """Whether all texts in a JSON value can be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _problem(body: type[Body], error: ValidationError, data: Any) -> Problem:
    """The first thing that is wrong."""
    found = error.errors(include_url=False)
    typed = (e for e in found if e["loc"][-1:] == ("type",))  # it says what else there may be
    first = next((e for e in found if e["type"] == UNKNOWN), found[0])
    first = next(typed, first)
    kind, path, value = first["type"], first["loc"], first["input"]
    if kind == UNKNOWN:
        return _unknown(body, path, first["ctx"]["name"])
    where, known_path = _where(path), _known(body, path)
    if kind == "missing" and known_path == path:
        return Problem(400, f"{where} is missing", where, "missing_field")
    if known_path != path:  # it may have several types, and none of them fits
        path, where = known_path, _where(known_path)
        value = reduce(lambda part, key: part[key], path, data)
    text = f"{where} must be {expected(_schema_at(body, path))}, not {shortened(value)}"
    return Problem(400, text, where, "invalid_value")


def _unknown(body: type[Body], path: tuple[int | str, ...], name: str) -> Problem:
    """The problem of a field that the part at ``path`` has not."""
    above, known = _where(path), list(_schema_at(body, path)["properties"])
    where = _where((*path, name))
    instead = None
    if above:
        known = [f"{above}.{k}" for k in known]
    else:
        known = sorted((body.own() | body.taken().keys()) - body.REFUSED.keys())
        instead = elsewhere(name, body.taken())
    text = str(UnknownNameError("field", where, known, instead))
    return Problem(400, text, where, "unknown_field")


def _known(body: type[Body], path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The part of ``path`` that leads through one type each."""
    for length in range(len(path), 0, -1):
        with suppress(KeyError):
            _schema_at(body, path[:length])
            return path[:length]
    return ()


def _where(path: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key[:LONGEST_PATH]}" if text else key
    return text[:LONGEST_PATH]


@cache
def _schema(body: type[Body]) -> dict[str, Any]:
    return body.model_json_schema()


def _schema_at(body: type[Body], path: tuple[int | str, ...]) -> dict[str, Any]:
    """The JSON schema of the part of ``body`` at ``path``; `KeyError` inside of what may have
    several types."""
    whole = _schema(body)
    part = whole
    for key in (None, *path):
        if isinstance(key, str):
            part = part["properties"][key]
        elif isinstance(key, int):
            part = part["items"]
        kinds = [p for p in part.get("anyOf", ()) if p.get("type") != "null"]
        part = kinds[0] if len(kinds) == 1 else part
        if "$ref" in part:
            part = whole["$defs"][part["$ref"].rpartition("/")[2]]
    return part


def expected(schema: Mapping[str, Any]) -> str:
    """What a value of ``schema`` is, in words."""
    if "description" in schema and "properties" not in schema:
        return str(schema["description"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    kind = schema.get("type", "")
    names = {"integer": "a whole number", "number": "a number", "boolean": "true or false",
             "string": "a string", "array": "a list", "object": "an object"}  # fmt: skip
    text = names.get(kind, "something else")
    if "minLength" in schema:
        text += f" of {schema['minLength']} to {schema['maxLength']} characters"
    if "minimum" in schema:
        text += f" from {schema['minimum']:g}"
    if "exclusiveMinimum" in schema:
        text += f" above {schema['exclusiveMinimum']:g}"
    if "maximum" in schema:
        text += f" to {schema['maximum']:.12g}" if schema["maximum"] < 2**53 else ""
    if "minItems" in schema:
        text += f" of at least {schema['minItems']}"
    if "maxItems" in schema:
        text += f", at most {schema['maxItems']}"
    return text
