"""What is declared once: fields with a type, a range, a default and a sentence, and what follows
from them.  The library checks values by a declaration, the command line makes its options of it,
and the server takes its fields from bodies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from .errors import ConfigError, DllmError, UnknownNameError, short

ANSWER, HOLES, VERIFIER, MACHINE = "answer", "holes", "verifier", "machine"


@dataclass(frozen=True)
class About:
    """What is said of a field beside its type.  ``says``: what it does; the first sentence is
    the help of the command line.  ``of``: who takes it: an answer, a text with holes, a verifier;
    or the machine, and no text.  ``kind``: what a value is, where its type does not say it
    in words.  ``wire``: its name in a body, None for a field of none.  ``flag``: its option."""

    says: str
    of: frozenset[str] = frozenset({ANSWER, HOLES})
    kind: str = ""
    wire: str | None = ""
    flag: str = ""


def about(says: str, *of: str, **more: Any) -> About:
    return About(says, frozenset(of or (ANSWER, HOLES)), **more)


def listed(value: Any) -> Any:
    """An array as a list, one without dimensions as its number; other values as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def _whole(value: Any) -> Any:
    value = listed(value)
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else value


def _real(value: Any) -> Any:
    value = listed(value)
    if not isinstance(value, Real) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:
        large: Any = value
        return 1.7e308 if large > 0 else -1.7e308  # out of every range


Whole, Numeric = BeforeValidator(_whole), BeforeValidator(_real)  # those of numpy, too


class Declared(BaseModel):
    """Values that are checked when they are given.  ``model_fields_set`` says which were."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )
    KIND: ClassVar[str] = "argument"
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}  # what others call it -> what to write here

    if not TYPE_CHECKING:  # whose signature is made of the fields

        def __init__(self, **given: Any) -> None:
            try:
                super().__init__(**given)
            except ValidationError as error:
                raise refusal(type(self), error, given) from None

    def but(self, **changes: Any) -> Self:
        """A copy with some values changed, which are of the right type."""
        return self.model_copy(update=changes)

    @classmethod
    @cache
    def fields(cls, *of: str) -> dict[str, FieldInfo]:
        """The fields, or those that one of ``of`` takes."""
        return {n: f for n, f in cls.model_fields.items() if not of or about_of(f).of & {*of}}


def about_of(field: FieldInfo) -> About:
    return next((one for one in field.metadata if isinstance(one, About)), About(""))


def refusal(cls: type[Declared], error: ValidationError, given: Mapping[str, Any]) -> DllmError:
    """The first thing that is wrong with ``given``, as one sentence that begins with its name."""
    found = error.errors(include_url=False, include_input=False)
    first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])
    kind, limits, path = first["type"], first.get("ctx", {}), first["loc"]
    name = str(path[0]) if path else ""
    own = limits.get("error")
    if isinstance(own, DllmError):
        own.field = name or None
        return own
    if kind == "extra_forbidden":
        return UnknownNameError(cls.KIND, name, cls.model_fields, cls.ELSEWHERE.get(name.lower()))
    value, where = _at(given, path, name)
    words: dict[str, Callable[[], str]] = {
        "finite_number": lambda: f"must be finite, not {value}",
        "greater_than_equal": lambda: f"must be at least {limits['ge']:n}, not {short(value)}",
        "greater_than": lambda: f"must be above {limits['gt']:n}, not {short(value)}",
        "less_than_equal": lambda: f"must be at most {limits['le']:n}, not {short(value)}",
        "int_type": lambda: f"must be a whole number, not {short(value)}",
        "float_type": lambda: f"must be a number, not {short(value)}",
        "literal_error": lambda: f"is {limits['expected']}, not {short(value)}",
        "bool_type": lambda: f"is True or False, not {short(value)}",
    }
    say = words.get(kind, lambda: f"cannot be {short(value)}: {first['msg']}")
    told = about_of(cls.model_fields[name]).kind if len(path) == 1 else ""
    refused = ConfigError(f"{name} is {told}, not {short(value)}" if told else f"{where} {say()}")
    refused.field = name
    return refused


def _at(given: Mapping[str, Any], path: tuple[int | str, ...], called: str) -> tuple[Any, str]:
    """The value that ``path`` leads to, and what it is called."""
    if path[-1] == "[key]":
        return path[-2], f"an id of {called}"
    value: Any = given.get(str(path[0]))
    for key in path[1:]:
        try:
            value = value[key]
        except (TypeError, LookupError):  # part of a union, or a key of another type
            continue
        called = f"{called}[{key}]"
    return value, called
