"""From names to a `Sampler`: registry, roles, needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, cast

from ..capabilities import Capability
from ..errors import ConfigError, UnknownNameError
from ..registry import Registry
from ..spec import arguments, parse
from .base import Part, Reviser, Sampler, Scorer, Selector, Stop, Window

SAMPLERS: Registry[Part] = Registry("sampler")
register = SAMPLERS.register

EXCLUSIVE = ("window", "scorer", "reviser", "eos")
ROLES = (*EXCLUSIVE, "selector", "stop")
DEFAULTS = ("threshold", "blocks", "prob", "eos")  # what fills a role that nobody asks for

SamplerLike = str | Part | Sequence[Part] | Sampler


@dataclass(frozen=True)
class Info:
    """One line of a listing."""

    name: str
    role: str
    summary: str
    paper: str
    arxiv: str
    needs: tuple[str, ...]
    defaults: Mapping[str, Any]


def info(cls: type[Part]) -> Info:
    """What a listing says about a registered class."""
    summary = (cls.__doc__ or "").strip().split("\n")[0]
    needs = tuple(sorted(map(str, cls.needs)))
    return Info(cls.name, cls.role, summary, cls.paper, cls.arxiv, needs, arguments(cls))


def available() -> list[Info]:
    """Every registered sampler part, by role and name."""
    infos = [info(SAMPLERS[name]) for name in SAMPLERS]
    return sorted(infos, key=lambda i: (i.role != "selector", i.role, i.name))


class Needy(Protocol):
    """A part of a sampler, or a cache."""

    name: ClassVar[str]

    @property
    def needs(self) -> frozenset[Capability]: ...


def check_needs(
    parts: Iterable[Needy], offers: Mapping[str, frozenset[Capability]], source: str
) -> None:
    """Raise when a part needs something from ``source`` (e.g. "a cache") that is not offered.

    ``offers`` has one entry: the name of what fills that place, and what it offers.
    """
    (offerer, offered), *_ = offers.items()
    for part in parts:
        for need in sorted(part.needs - offered, key=str):
            if need.source == source:
                others = sorted(
                    name for name in SAMPLERS if need in SAMPLERS[name].offers and name != offerer
                )
                hint = f"use {need.remedy or ' or '.join(others)}"
                raise ConfigError(
                    f"{part.name} needs {need}, which {offerer} does not offer; {hint} instead"
                )


def compose(
    sampler: SamplerLike,
    *,
    options: Mapping[str, Any] | None = None,
    stop_ids: Sequence[int] = (),
) -> Sampler:
    """Build a complete sampler.

    ``sampler`` is a string, a part, parts, or a finished `Sampler`.  ``options`` (e.g. ``steps``,
    ``block_length``) fill the fields of that name which the parts leave at ``None``; an option
    that no part takes is an error, never ignored.
    """
    if isinstance(sampler, Sampler):
        return replace(sampler, stop_ids=tuple(stop_ids))
    parts = _as_parts(sampler)
    roles: dict[str, list[Part]] = {role: [] for role in ROLES}
    for part in parts:
        if part.role in EXCLUSIVE and roles[part.role]:
            raise ConfigError(
                f"{roles[part.role][0].name} and {part.name} are both a {part.role}: keep one"
            )
        roles[part.role].append(part)
    completing = [companion for part in parts for companion in part.companions()]
    for part in (*completing, *(SAMPLERS[name]() for name in DEFAULTS)):
        if not roles[part.role]:
            roles[part.role].append(part)
    roles = _fill_options(roles, options or {}, spec=_spec_of(sampler))
    scorer = cast(Scorer, roles["scorer"][0])
    check_needs(
        (part for group in roles.values() for part in group),
        {scorer.name: scorer.offers},
        "a scorer",
    )
    return Sampler(
        spec=_spec_of(sampler),
        window=cast(Window, roles["window"][0]),
        scorer=scorer,
        selectors=cast("tuple[Selector, ...]", tuple(roles["selector"])),
        eos=roles["eos"][0],  # type: ignore[arg-type]
        stops=cast("tuple[Stop, ...]", tuple(roles["stop"])),
        reviser=cast("Reviser | None", roles["reviser"][0] if roles["reviser"] else None),
        stop_ids=tuple(stop_ids),
    )


def _as_parts(sampler: str | Part | Sequence[Part]) -> tuple[Part, ...]:
    if isinstance(sampler, str):
        return parse(sampler, SAMPLERS)
    parts = tuple(sampler) if isinstance(sampler, list | tuple) else (sampler,)
    for part in parts:
        if not isinstance(part, Part) or part.role not in ROLES:
            raise ConfigError(f"{part!r} is not a sampler part: use a name or a registered class")
    return parts


def _spec_of(sampler: str | Part | Sequence[Part]) -> str:
    if isinstance(sampler, str):
        return sampler
    return "+".join(part.name for part in _as_parts(sampler))


def _fill_options(
    roles: dict[str, list[Part]], options: Mapping[str, Any], spec: str
) -> dict[str, list[Part]]:
    """Copies of the parts with their open fields set from ``options``."""
    unused = set(options)

    def fill(part: Part) -> Part:
        own = arguments(part)
        taken = {key: value for key, value in options.items() if key in own}
        unused.difference_update(taken)
        for key, value in taken.items():
            if getattr(part, key) not in (None, value):
                raise ConfigError(
                    f"{key} is given twice: {getattr(part, key)} in {spec!r} and {value} beside it"
                )
        return replace(part, **taken) if taken else part

    filled = {role: [fill(part) for part in group] for role, group in roles.items()}
    for key in sorted(unused):
        takers = sorted(n for n in SAMPLERS if key in arguments(SAMPLERS[n]))
        if not takers:
            raise UnknownNameError("sampler option", key, ("steps", "block_length"))
        raise ConfigError(f"sampler {spec!r} takes no {key}; {', '.join(takers)} would")
    return filled
