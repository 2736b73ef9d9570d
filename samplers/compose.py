"""From names to a `Sampler`: registry, roles, needs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from operator import attrgetter
from typing import Any, Protocol, TypeVar, cast, dataclass_transform

from ..core.capabilities import ENTROPY, FIXED_WINDOW, Capability
from ..core.errors import ConfigError, UnknownNameError, short
from ..core.registry import Registry
from ..core.spec import Info, arguments, fill_open, info, parse
from .base import Part, Selector
from .sampler import Sampler
from .turn import Length

P = TypeVar("P", bound=Part)
SAMPLERS: Registry[Part] = Registry("sampler", Part, {
    "greedy": "'llada', one token per step, or 'threshold'",
    "low_confidence": "'llada'", "random": "'llada(remasking=random)'",
    "confidence": "'threshold'", "entropy": "'eb', or 'dream(alg=entropy)'",
})  # fmt: skip

EXCLUSIVE = ("window", "scorer", "reviser", "eos", "explorer", "length")
SHARED = ("course", "selector", "stop", "transform")
ROLES = (*EXCLUSIVE, *SHARED)
# What fills a role that nobody asks for; where scores are no probabilities, one token per step.
DEFAULTS = ("threshold", "fixed", "blocks", "prob", "eos")
# What kind of part the needs of others call it by, where that is not its role.
SOURCES = {
    "course": "a selector", "stop": "a selector", "transform": "a selector",
    "eos": "an eos rule", "length": "a length rule", "explorer": "an explorer",
}  # fmt: skip

SamplerLike = str | Part | Sequence[Part] | Sampler


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register(name: str, **facts: object) -> Callable[[type[P]], type[P]]:
    """Class decorator: a frozen dataclass, known by ``name``, on which ``facts`` are set."""
    return SAMPLERS.part(name, **facts)


def available() -> list[Info]:
    """Every registered sampler part, by role and name."""
    infos = [info(SAMPLERS[name], SAMPLERS[name].role) for name in SAMPLERS]
    return sorted(infos, key=lambda i: (i.role != "selector", i.role, i.name))


class HasNeeds(Protocol):
    """A part of a sampler, or a cache."""

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[Capability]: ...


def check_needs(
    parts: Iterable[HasNeeds], source: str, offerer: str, offered: frozenset[Capability]
) -> None:
    """Raise when a part needs something that ``source`` (e.g. "a cache") could offer, but
    ``offerer``, which fills that place, does not."""
    for part in parts:
        for need in sorted(part.needs - offered, key=attrgetter("name")):
            if source in need.remedies:
                others = ((name, SAMPLERS[name].offers) for name in sorted(SAMPLERS))
                able = (n for n, own in others if isinstance(own, frozenset) and need in own)
                remedy = need.remedies[source] or f"use {' or '.join(able)}"
                raise ConfigError(
                    f"{part.name} needs {need}, which {offerer} does not offer; {remedy} instead"
                )


def compose(
    sampler: SamplerLike,
    *,
    length: str | Part | None = None,
    options: Mapping[str, Any] | None = None,
    stop_ids: Sequence[int] = (),
    family: str = "llada",
    facts: Mapping[str, Any] | None = None,
) -> Sampler:
    """Build a complete sampler.

    ``sampler`` is a string, a part, parts, or a finished `Sampler`; ``length`` adds a part that
    finds the length of the text, "fixed" none.  ``options`` (e.g. ``steps``, ``block_length``) fill
    the fields of that name which the parts leave at ``None``; an option that no part takes is an
    error, never ignored.  Fields still open then are filled from ``facts`` (what is known about the
    model, e.g. ``delimiters``; a value or a function that finds it) and from what the paper uses
    for the model's ``family``.
    """
    if isinstance(sampler, list | tuple) and not sampler:
        raise ConfigError("there is no sampler: name one, e.g. 'threshold'")
    parts = _as_parts(sampler)
    named = sampler.spec if isinstance(sampler, Sampler) else "+".join(part.name for part in parts)
    spec = sampler if isinstance(sampler, str) else named
    if length not in (None, "fixed"):
        parts, spec = (*parts, *_length(length)), f"{spec}+{length}"
    roles = _complete(parts, family)
    roles = _fill_options(roles, options or {}, spec, given=parts)
    known = {
        **(facts or {}),
        # What scores less is unsure.
        "tau_low": -0.5 if ENTROPY in roles["scorer"][0].offers else 0.3,
        "progress": "steps" if _scheduled(roles) else "tokens",
    }
    if FIXED_WINDOW not in roles["window"][0].offers:  # it reaches into the next block
        known["lookahead"] = 1
    roles = {
        role: [fill_open(part, family, known) for part in group] for role, group in roles.items()
    }
    _check_composition([part for group in roles.values() for part in group], roles)
    places = {"selector": "selectors", "stop": "stops", "transform": "transforms",
              "course": "choosers"}  # fmt: skip
    several: dict[str, Any] = {places[role]: tuple(roles[role]) for role in SHARED}
    single: dict[str, Any] = {role: next(iter(roles[role]), None) for role in EXCLUSIVE}
    return Sampler(spec=spec, **single, **several, stop_ids=tuple(stop_ids))


def _scheduled(roles: Mapping[str, list[Part]]) -> bool:
    """Whether the number of steps is planned: by a selector, or named where progress is judged."""
    selectors = cast("list[Selector]", roles["selector"])
    judged = any(getattr(stop, "steps", None) is not None for stop in roles["stop"])
    return judged or any(selector.scheduled for selector in selectors)


def _complete(parts: Iterable[Part], family: str) -> dict[str, list[Part]]:
    """The parts by role; open roles filled by what the parts bring along, then by defaults."""
    roles: dict[str, list[Part]] = {role: [] for role in ROLES}
    for part in parts:
        if part.role in EXCLUSIVE and roles[part.role]:
            kind = SOURCES.get(part.role, f"a {part.role}")
            raise ConfigError(
                f"{roles[part.role][0].name} and {part.name} are both {kind}: keep one"
            )
        roles[part.role].append(part)
    given = [part for group in roles.values() for part in group]

    def companions(part: Part) -> list[Part]:
        named = [*part.companions(family)]
        if part.role != "length":
            return named
        # One beside another method leaves that method its own parts.
        return [one for one in named if not any(_lacks(other, one) for other in given)]

    brought = _join(roles, [companion for part in given for companion in companions(part)])
    # A companion may bring companions of its own, e.g. the score its rule is about.
    _join(roles, [companion for part in brought for companion in companions(part)])
    _join(roles, [SAMPLERS[name]() for name in DEFAULTS])
    return roles


def _join(roles: dict[str, list[Part]], parts: Iterable[Part]) -> list[Part]:
    """Add those whose role is open and whose needs the parts so far meet; which these were."""
    joined = []
    for part in parts:
        open_ = part.role == "course" or not roles[part.role]
        if open_ and not any(_lacks(part, other) for group in roles.values() for other in group):
            roles[part.role].append(part)
            joined.append(part)
    return joined


def _lacks(part: Part, other: Part) -> bool:
    """Whether a part needs something that another in that role could offer, and does not."""
    source = SOURCES.get(other.role, f"a {other.role}")
    return any(source in need.remedies and need not in other.offers for need in part.needs)


def _check_composition(parts: list[Part], roles: Mapping[str, list[Part]]) -> None:
    """Needs that parts of the same sampler have to meet."""
    for role in ("scorer", "window", "selector", "reviser", "eos", "stop", "transform", "course",
                 "length"):  # fmt: skip
        for part in roles[role]:
            source = SOURCES.get(role, f"a {role}")
            others = [other for other in parts if other is not part]
            check_needs(others, source, str(part), part.offers)
    _check_length(roles)


def lengths(fills: bool = False) -> list[str]:
    """Names of the parts that change the length of an answer, or with ``fills`` of holes."""
    known = [cast("type[Length]", SAMPLERS[n]) for n in SAMPLERS if SAMPLERS[n].role == "length"]
    return sorted(part.name for part in known if part.edits == "holes" or not fills)


def _length(length: Any) -> tuple[Part, ...]:
    """The part that ``length=`` names."""
    known = lengths()
    if isinstance(length, str) and length.split("(")[0].strip() not in known:
        raise UnknownNameError("length", length, ["fixed", *known])
    parts = _as_parts(length)
    if [part.role for part in parts] != ["length"]:
        raise UnknownNameError("length", str(length), ["fixed", *known])
    return parts


def _check_length(roles: Mapping[str, list[Part]]) -> None:
    """What changes the length of a text goes together with what does not plan for it."""
    if not roles["length"]:
        return
    length = cast(Length, roles["length"][0])
    if getattr(length, "eos_token_id", 0) is None:
        raise ConfigError(
            f"{length.name} looks for the end-of-text token and the model has none: pass "
            "eos_token_id to dllm.load, or use length='fixed'"
        )
    if getattr(length, "expand_token_id", 0) is None:
        raise ConfigError(
            f"{length.name} is for models with a token that asks for another mask: load one of "
            "family 'dreamon', or pass expand_token_id to dllm.load"
        )
    moves = length.edits in ("text", "holes")
    refused = [*roles["explorer"], *(roles["reviser"] if moves else ())]
    for part in roles["selector"]:
        planned = getattr(part, "steps", None) is not None
        if planned or (length.edits != "end" and getattr(part, "scheduled", False)):
            refused.append(part)
    if refused:
        raise ConfigError(
            f"{refused[0].name} plans for a text whose length does not change, and {length.name} "
            "changes it: use sampler='threshold', or length='fixed'"
        )


def _no_part(given: Any) -> str:
    """What to write in place of something that is no part of a sampler."""
    if isinstance(given, type) and issubclass(given, Part):
        return f"{given.__name__} is a class: pass an object of it, {given.__name__}(...)"
    if callable(given):
        return (
            f"{short(given)} is no part of a sampler: write a class with the method select, see "
            "dllm.samplers.base.Selector"
        )
    if isinstance(given, str):
        return f"{given!r} stands in a list: write names as one string, and join with '+'"
    return f"{short(given)} is not a sampler part: use a name or a registered class"


def _as_parts(sampler: SamplerLike) -> tuple[Part, ...]:
    if isinstance(sampler, Sampler):
        return sampler.parts
    parts: tuple[Any, ...]
    if isinstance(sampler, str):
        parts = parse(sampler, SAMPLERS)
    else:
        parts = tuple(sampler) if isinstance(sampler, list | tuple) else (sampler,)
    for part in parts:
        if not isinstance(part, Part) or part.role not in ROLES:
            raise ConfigError(_no_part(part))
    # What a part wraps stands before it: lopa(localleap) is localleap, explored by lopa.
    return tuple(p for part in parts for p in (*_as_parts(getattr(part, "base", ())), part))


def _fill_options(
    roles: dict[str, list[Part]], options: Mapping[str, Any], spec: str, given: Sequence[Part]
) -> dict[str, list[Part]]:
    """Copies of the parts with their open fields set from ``options``, which also overrule what
    parts have brought along, but nothing that was ``given``."""
    unused = set(options)

    def fill(part: Part) -> Part:
        own = arguments(part)
        taken = {key: value for key, value in options.items() if key in own}
        unused.difference_update(taken)
        for key, value in taken.items():
            if any(part is other for other in given) and getattr(part, key) not in (None, value):
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
