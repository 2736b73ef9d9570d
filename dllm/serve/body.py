"""What bodies of requests are made of: pydantic models whose errors name the field to blame, say
what it must be, and suggest the one that was meant."""

import json
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, core_schema

from ..core.errors import UnknownNameError
from .problems import Problem, invalid, shortened
from .wire import parameters
from .words import elsewhere, wire_names

LONGEST_PATH = 80  # characters of the name of a field
# What pydantic calls otherwise.
KINDS = {
    "bool_type": "true or false", "int_type": "a whole number", "float_type": "a number",
    "string_type": "a string", "list_type": "a list", "dict_type": "an object",
    "model_type": "an object",
}  # fmt: skip
UNFIT, UNKNOWN, UNSUPPORTED = "unfit", "unknown", "unsupported_value"
Refusals = dict[str, tuple[str, tuple[Any, ...]]]  # field: the reason, harmless values


@dataclass(frozen=True, eq=False)
class Must:
    """Annotation of a field: a sentence that says what its value must be, and a test of the value
    beyond its type."""

    text: str
    accepts: Callable[[Any], bool] = lambda _: True

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "description": self.text}

    def _check(self, value: Any, inner: Callable[[Any], Any]) -> Any:
        with suppress(ValidationError):
            if self.accepts(read := inner(value)):
                return read
        raise PydanticCustomError(UNFIT, "must be {text}", {"text": self.text})


class Body(BaseModel):
    """A body or a part of one: values have the types of JSON, and null is not given.  Other fields
    are refused, or ignored where the part is not ``STRICT``."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    STRICT: ClassVar[bool] = True
    TAKES: ClassVar[Collection[str]] = ()  # parameters of `GenerationConfig` beside the fields
    REFUSED: ClassVar[Refusals] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = cls.own()
        given = {k: v for k, v in data.items() if v is not None}
        unknown = next((k for k in given if k not in known), None) if cls.STRICT else None
        if unknown is not None:  # the first one: there may be a hundred thousand
            raise PydanticCustomError(UNKNOWN, "{name}", {"name": unknown, "known": [*known]})
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
            at = name.encode(errors="replace").decode()[:80]
            raise invalid(at, f"{ascii(name)[:80]} is not valid Unicode: it has half a surrogate")
        names = cls.taken()
        for name in data.keys() & cls.REFUSED.keys():
            reason, harmless = cls.REFUSED[name]
            kinds = [(type(one) is bool, one) for one in (None, *harmless)]  # true is not 1
            if (type(data[name]) is bool, data[name]) not in kinds:
                text = f"{name}={shortened(data[name])} is not supported: {reason}"
                raise Problem(400, text, name, UNSUPPORTED)
        fields = {k: v for k, v in data.items() if k not in names and k not in cls.REFUSED}
        try:
            body = cls.model_validate(fields)
        except ValidationError as error:
            raise _problem(cls, error) from None
        sent = {k: v for k, v in data.items() if k in names and v is not None}
        body.__dict__["how"] = parameters(sent, names)
        return body

    @classmethod
    @cache
    def taken(cls) -> dict[str, str]:
        """Name in the body -> parameter, of those that are no fields."""
        every, own = wire_names(tuple(cls.TAKES)), cls.own() | cls.REFUSED.keys()
        return {there: name for there, name in every.items() if there not in own}

    @cached_property
    def how(self) -> dict[str, Any]:
        """Those of `GenerationConfig` that were sent, checked."""
        return {}

    def value(self, name: str) -> Any:
        """What was sent as ``name``, a field or a parameter."""
        known = self.taken()
        return self.how.get(known[name]) if name in known else getattr(self, name)

    @property
    def texts(self) -> list[Any]:
        """What may not be longer than the model can take."""
        return [value for value in self.given.values() if isinstance(value, list)]

    @property
    def given(self) -> dict[str, Any]:
        """The fields that have a value."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class Echoed(Body):
    """A part that clients send back as they got it, which may hold more than is read here."""

    STRICT = False


def is_unicode(value: Any) -> bool:
    """Whether all texts in a JSON value can be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _problem(body: type[Body], error: ValidationError) -> Problem:
    """The first thing that is wrong."""
    found = error.errors(include_url=False)
    typed = (e for e in found if e["loc"][-1:] == ("type",))  # it says what else there may be
    first = next((e for e in found if e["type"] == UNKNOWN), found[0])
    first = next(typed, first)
    kind, path, value = first["type"], first["loc"], first["input"]
    if kind == UNKNOWN:
        return _unknown(body, path, **first["ctx"])
    where = _where(path)
    if kind == "missing":
        return Problem(400, f"{where} is missing", where, "missing_field")
    said = f"must be {KINDS[kind]}" if kind in KINDS else first["msg"]
    said = re.sub(r"^\w+ should|( after validation)?, not \d+$", lambda m: "must" * (not m.start()),
                  said)  # fmt: skip
    return invalid(where, f"{where} {said}, not {shortened(value)}")


def _unknown(body: type[Body], path: tuple[int | str, ...], name: str, known: list[str]) -> Problem:
    """The problem of a field that the part at ``path`` has not."""
    above, instead = _where(path), None
    if above:
        known = [f"{above}.{k}" for k in sorted(known)]
    else:
        known = sorted((body.own() | body.taken().keys()) - body.REFUSED.keys())
        instead = elsewhere(name, body.taken())
    where = _where((*path, name))
    text = str(UnknownNameError("field", where, known, instead))
    return Problem(400, text, where, "unknown_field")


def _where(path: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key[:LONGEST_PATH]}" if text else key
    return text[:LONGEST_PATH]
