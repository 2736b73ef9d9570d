"""Which settings make up the curve of a sampler: one knob each, from slow and safe to fast.

The table names the knob of every sampler; a sampler that is not in it (a third party's, a new one)
is swept over the first of its arguments that `BY_FIELD` knows, and a part that only says where to
commit or when to stop over the threshold it is combined with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..errors import ConfigError, UnknownNameError
from ..samplers import Info, available, compose
from .measure import Setting

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)  # of one step per position
TAUS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.5)
BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Knob:
    """An argument of a sampler and the values to try; ``steps`` are shares of the canvas."""

    argument: str
    values: Sequence[Any]

    def specs(self, name: str, canvas: int) -> list[str]:
        if self.argument == "steps":
            slow = [name] if 1 in self.values else []  # the default: one step per position
            counts = [max(1, round(share * canvas)) for share in self.values if share < 1]
            return slow + [f"{name}(steps={count})" for count in counts]
        return [f"{name}({self.argument}={value})" for value in self.values]


KNOBS: dict[str, Knob] = {
    "llada": Knob("steps", SHARES),
    "dream": Knob("steps", SHARES),
    "threshold": Knob("tau", TAUS),
    "capped_threshold": Knob("steps", SHARES),
    "factor": Knob("factor", (0.1, 0.25, 0.5, 1.0, 1.5, 2.0)),
    "eb": Knob("gamma", (0.001, 0.01, 0.05, 0.1, 0.5, 1.0)),
    "dparallel": Knob("tau", (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)),
}
BY_FIELD: dict[str, Sequence[Any]] = {
    "tau": TAUS, "threshold": TAUS, "gamma": KNOBS["eb"].values, "steps": SHARES,
}  # fmt: skip
SWEPT = ("selector", "window", "explorer", "stop", "reviser")  # roles that make a method
OPTIONS = ("steps", "block_length", "eos_policy")  # arguments that are meant for samplers
BASIC = {"blocks", "whole", "eos"}  # what other samplers are built from


def samplers_with_curves() -> list[str]:
    """Every registered sampler that is a method of its own, in order of role and name."""
    return [info.name for info in available() if info.role in SWEPT and info.name not in BASIC]


def curve(name: str, canvas: int) -> list[str]:
    """Specs of a sampler's curve on a canvas of that many positions; those that cannot be composed
    are left out, and a sampler always has its defaults."""
    info = _info(name)
    found = KNOBS[name].specs(name, canvas) if name in KNOBS else _derived(info, canvas)
    return [spec for spec in found if composes(spec)] or [name]


def _info(name: str) -> Info:
    infos = {info.name: info for info in available()}
    if name not in infos:
        raise UnknownNameError("sampler", name, infos)
    return infos[name]


def _derived(info: Info, canvas: int) -> list[str]:
    for argument, values in BY_FIELD.items():
        if argument in info.defaults:
            return Knob(argument, values).specs(info.name, canvas)
    if info.role == "selector":
        return [info.name]
    return [f"{info.name}+{spec}" for spec in KNOBS["threshold"].specs("threshold", canvas)]


def composes(spec: str, options: dict[str, Any] | None = None) -> bool:
    """Whether the parts that ``spec`` names go together, and take the options."""
    try:
        compose(spec, options=options)
    except ConfigError:
        return False
    return True


def spread(spec: str) -> Iterator[str]:
    """``threshold(tau={0.5,0.9})`` stands for one spec per value in braces."""
    fixed, choices = BRACES.split(spec)[::2], BRACES.findall(spec)
    for values in product(*(choice.split(",") for choice in choices)):
        pieces = (a + b.strip() for a, b in zip(fixed, (*values, ""), strict=True))
        yield "".join(pieces)


def settings(
    samplers: Sequence[str], curves: Sequence[str], caches: Sequence[str], arguments: dict[str, Any]
) -> list[Setting]:
    """Every combination, each once: specs as they are, names in ``curves`` as their curve.

    A sampler gets those of the ``arguments`` for samplers, e.g. ``block_length``, that it takes.
    """
    canvas = int(arguments.get("max_new_tokens", 64))
    chosen = [(spec.split("(")[0], one) for spec in samplers for one in spread(spec)]
    chosen += [(name, spec) for name in curves for spec in curve(name, canvas)]
    for _, spec in chosen:
        compose(spec)  # an unknown name is refused before anything is measured
    found = [
        Setting(
            method if cache == "none" else f"{method} · {cache}",
            spec,
            cache,
            {k: v for k, v in arguments.items() if k not in OPTIONS or composes(spec, {k: v})},
        )
        for cache, (method, spec) in product(caches, chosen)
    ]
    return list({repr(setting): setting for setting in found}.values())
