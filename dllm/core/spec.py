"""The string syntax of samplers and caches: ``"adablock+localleap(tau_r=0.7)"``.

``name``, ``name(argument, key=value)`` and ``a+b``.  Values are Python literals; a bare word is a
string (``remasking=random``), ``inf`` is infinity, and where parts are taken a name or call is one.
"""

import ast
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import ConfigError, DllmError, UnknownNameError, short
from .limits import check_limits
from .registry import Registry

T = TypeVar("T")
FamilyDefaults = Mapping[str, Mapping[str, Any]]  # family -> field -> value
LONGEST = 4096  # characters of a spec
LARGEST = 1e30  # of what is finite: float32 goes little further
WORDS = {"inf": math.inf, "true": True, "false": False}
# Python 3.11 counts the depth of a syntax tree per interpreter while it makes one: two threads that
# do so at a time may end in a SystemError.
_PARSING = threading.Lock()


def arguments(cls: Any) -> dict[str, Any]:
    """Argument names of a part class and their defaults."""
    return {field.name: field.default for field in fields(cls)} if is_dataclass(cls) else {}


@dataclass(frozen=True)
class Info:
    """What a listing says of a part: ``summary`` in one line, ``about`` the rest."""

    name: str
    role: str
    summary: str
    about: str
    paper: str
    arxiv: str
    needs: tuple[str, ...]
    offers: tuple[str, ...]
    defaults: Mapping[str, Any]


def info(cls: Any, role: str = "", offers: Iterable[Any] = ()) -> Info:
    """What a listing says of a class: its docstring's first paragraph as one line, and the rest."""
    summary, _, about = inspect.cleandoc(cls.__doc__ or "").partition("\n\n")
    needs: Any = getattr(cls, "needs", ())
    needs = cls().needs if isinstance(needs, property) else needs  # it depends on the arguments
    return Info(
        cls.name, role, " ".join(summary.split()), about, cls.paper, cls.arxiv,
        tuple(sorted(map(str, needs))), tuple(sorted(map(str, offers))), arguments(cls),
    )  # fmt: skip


def fill_open(part: T, family: str, facts: Mapping[str, Any] | None = None) -> T:
    """A copy of ``part`` without open fields (those left at None), as far as something is known:
    from what its paper uses for ``family`` (`family_defaults`; those of LLaDA where it names none),
    then from ``facts``, values or functions that find them."""
    defaults: FamilyDefaults = getattr(part, "family_defaults", {})
    known = {**(facts or {}), **(defaults.get(family) or defaults.get("llada", {}))}
    result = {
        name: known[name]() if callable(known[name]) else known[name]
        for name in arguments(part)
        if name in known and getattr(part, name) is None
    }
    changed: Any = replace(part, **result) if result else part  # type: ignore[type-var]
    return cast(T, changed)


def parse(spec: Any, registry: Registry[T]) -> tuple[T, ...]:
    """The parts that ``spec`` names, in order, each built with its arguments."""
    if not isinstance(spec, str):
        raise ConfigError(f"a {registry.kind} is a name or an object of one, not {spec!r}")
    if len(spec) > LONGEST:
        raise ConfigError(
            f"a {registry.kind} is written in at most {LONGEST} characters, not {len(spec)}: "
            f"{spec[:40]!r}..."
        )
    unreadable = ConfigError(
        f"cannot read {registry.kind} {spec[:80]!r}: write name(key=value), with "
        "quotes around paths, and join with '+'"
    )
    try:
        with _PARSING:
            tree = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise unreadable from None
    try:
        return tuple(_build(node, registry, spec) for node in _terms(tree))
    except RecursionError:  # nested too deeply
        raise unreadable from None


def parse_one(spec: Any, registry: Registry[T]) -> T:
    """The part that ``spec`` names, where it has to be one."""
    parts = parse(spec, registry)
    if len(parts) != 1:
        raise ConfigError(f"{spec!r} names {len(parts)} {registry.kind}s: choose one")
    return parts[0]


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    return [node]


def _build(node: ast.expr, registry: Registry[T], spec: str) -> T:
    if isinstance(node, ast.Name):
        return build(registry[node.id], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        cls = registry[node.func.id]
        names, hints, given = list(arguments(cls)), _hints(cast(Any, cls)), dict[str, Any]()
        if len(node.args) > len(names):
            raise ConfigError(f"{node.func.id} takes at most {len(names)} arguments")
        keywords = [(key.arg or "**", key.value) for key in node.keywords]
        for name, value in [*zip(names, node.args, strict=False), *keywords]:
            if name in given:
                raise ConfigError(f"{name} is given twice in {spec!r}: keep one")
            named = isinstance(value, ast.Name) and value.id not in WORDS
            if _holds_parts(hints.get(name)) and (named or isinstance(value, ast.Call | ast.BinOp)):
                given[name] = tuple(_build(term, registry, spec) for term in _terms(value))
            else:
                given[name] = _value(value, spec)
        return build(cls, given)
    raise ConfigError(f"cannot read {ast.unparse(node)!r} in {registry.kind} {spec!r}")


def _value(node: ast.expr, spec: str) -> Any:
    if isinstance(node, ast.Name):
        return WORDS.get(node.id.lower(), node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ConfigError(
            f"cannot read the value {ast.unparse(node)!r} in {spec!r}: put quotes around what is "
            "neither a number nor a single word"
        ) from None


def build(cls: Callable[..., T], given: dict[str, Any]) -> T:
    """``cls(**given)`` with unknown names and values of a wrong type as one clear error."""
    called = getattr(cls, "name", cls)
    for name in given:
        if name not in arguments(cls):
            raise UnknownNameError(f"argument of {called}", name, arguments(cls))
    check_types(cls, given)
    try:
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
    except DllmError:
        raise
    except TypeError as error:
        raise ConfigError(f"wrong argument for {called}: {error}") from None


def check_types(cls: Any, given: Mapping[str, Any]) -> None:
    """Raise for a value that is not of its field's type."""
    hints = _hints(cls)
    for name, value in given.items():
        size: Any = abs(value) if isinstance(value, Real) else 0
        if LARGEST < size < math.inf:
            raise ConfigError(
                f"{name} must lie between {-LARGEST:g} and {LARGEST:g}, not {short(value)}"
            )
        hint = hints.get(name, Any)
        if _fits(value, hint):
            continue
        others = [n for n in arguments(cls) if n not in given and _fits(value, hints.get(n, Any))]
        remedy = f"; write {others[0]}={value!r}" if others and _holds_parts(hint) else ""
        raise ConfigError(
            f"wrong argument for {getattr(cls, 'name', cls)}: {name} takes {_in_words(hint)}, "
            f"not {short(value)}{remedy}"
        )


def check_part(part: Any) -> None:
    """Raise for what `build` refuses in an object that was made without it, and beyond a limit.
    Numbers of numpy, whose small types wrap around, become Python's."""
    usual = arguments(type(part))
    given = {name: value for name in usual if (value := getattr(part, name)) is not usual[name]}
    check_types(type(part), given)
    for name, value in given.items():
        if isinstance(value, Real) and not isinstance(value, bool):
            plain = int(value) if isinstance(value, Integral) else float(value)
            object.__setattr__(part, name, plain)
    check_limits(part)


@cache
def _hints(cls: Any) -> Mapping[str, Any]:
    """Types of the fields; none where a name in them is not known."""
    try:
        return get_type_hints(cls)
    except NameError:
        return {}


def _options(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, as far as the type is one of those in `WORDS_FOR`."""
    if hint in (int, float):  # a truth value counts as neither, nor does NaN
        number = Integral if hint is int else Real
        return isinstance(value, number) and not isinstance(value, bool) and value == value
    if len(_options(hint)) > 1:
        return any(_fits(value, option) for option in _options(hint))
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        return isinstance(value, tuple | list) and all(_fits(v, inner) for v in value)
    return isinstance(value, hint) if hint in WORDS_FOR or is_dataclass(hint) else True


WORDS_FOR = {
    int: "a whole number", float: "a number", bool: "True or False", str: "a word",
    type(None): "None",
}  # fmt: skip


def _in_words(hint: Any) -> str:
    def one(option: Any) -> str:
        if get_origin(option) is tuple:
            inner = get_args(option)[0]
            return (
                "parts such as threshold" if _holds_parts(option) else f"{one(inner)}, as in (1,)"
            )
        return WORDS_FOR.get(option, str(option))

    return " or ".join(one(option) for option in _options(hint))


def _holds_parts(hint: Any) -> bool:
    return get_origin(hint) is tuple and is_dataclass(get_args(hint)[0])
