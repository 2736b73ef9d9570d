"""The string syntax of samplers and caches: ``"adablock+localleap(tau_r=0.7)"``.

``name``, ``name(argument, key=value)`` and ``a+b``.  Values are Python literals; a bare word is a
string (``remasking=random``), ``inf`` is infinity, and a positional name or call is a nested part.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from .errors import ConfigError, DllmError, UnknownNameError
from .registry import Registry

T = TypeVar("T")
FamilyDefaults = Mapping[str, Mapping[str, Any]]  # family -> field -> value
WORDS = {"inf": math.inf, "true": True, "false": False}


def arguments(cls: Any) -> dict[str, Any]:
    """Argument names of a part class and their defaults."""
    return {field.name: field.default for field in fields(cls)} if is_dataclass(cls) else {}


def fill_open(part: T, family: str, facts: Mapping[str, Any] | None = None) -> T:
    """A copy of ``part`` without open fields (those left at None), as far as something is known:
    from what its paper uses for ``family`` (`family_defaults`; those of LLaDA where it names none),
    then from ``facts``, values or functions that find them."""
    defaults: FamilyDefaults = getattr(part, "family_defaults", {})
    known = {**(facts or {}), **(defaults.get(family) or defaults.get("llada", {}))}
    found = {
        name: known[name]() if callable(known[name]) else known[name]
        for name in arguments(part)
        if name in known and getattr(part, name) is None
    }
    changed: Any = replace(part, **found) if found else part  # type: ignore[type-var]
    return cast(T, changed)


def parse(spec: str, registry: Registry[T]) -> tuple[T, ...]:
    """The parts that ``spec`` names, in order, each built with its arguments."""
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
    except SyntaxError:
        raise ConfigError(
            f"cannot read {registry.kind} {spec!r}: write name(key=value) and join with '+'"
        ) from None
    return tuple(_build(node, registry, spec) for node in _terms(tree))


def _terms(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_terms(node.left), *_terms(node.right)]
    return [node]


def _build(node: ast.expr, registry: Registry[T], spec: str) -> T:
    if isinstance(node, ast.Name):
        return build(registry[node.id], {})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        cls = registry[node.func.id]
        names = list(arguments(cls))
        if len(node.args) > len(names):
            raise ConfigError(f"{node.func.id} takes at most {len(names)} arguments")
        given = {
            name: _positional(value, registry, spec)
            for name, value in zip(names, node.args, strict=False)
        }
        given |= {key.arg or "**": _value(key.value, spec) for key in node.keywords}
        return build(cls, given)
    raise ConfigError(f"cannot read {ast.unparse(node)!r} in {registry.kind} {spec!r}")


def _positional(node: ast.expr, registry: Registry[T], spec: str) -> Any:
    if isinstance(node, ast.Call | ast.BinOp) or (
        isinstance(node, ast.Name) and node.id not in WORDS
    ):
        return tuple(_build(term, registry, spec) for term in _terms(node))
    return _value(node, spec)


def _value(node: ast.expr, spec: str) -> Any:
    if isinstance(node, ast.Name):
        return WORDS.get(node.id.lower(), node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ConfigError(f"cannot read the value {ast.unparse(node)!r} in {spec!r}") from None


def build(cls: Callable[..., T], given: dict[str, Any]) -> T:
    """``cls(**given)`` with unknown names and wrong types as one clear error."""
    for name in given:
        if name not in arguments(cls):
            raise UnknownNameError(f"argument of {getattr(cls, 'name', cls)}", name, arguments(cls))
    try:
        return cls(**given)
    except DllmError:
        raise
    except TypeError as error:
        defaults = arguments(cls)
        words = [
            f"{key} takes no word: a number or None, not {value!r}"
            for key, value in given.items()
            if isinstance(value, str) and not isinstance(defaults[key], str)
        ]
        what = words[0] if words else str(error)
        raise ConfigError(f"wrong argument for {getattr(cls, 'name', cls)}: {what}") from None
