"""Which settings make up the curve of a sampler: one parameter each, from slow and safe to fast.

A sampler is swept over the first of its arguments that `BY_FIELD` knows, and a part that only says
where to commit or what to think of the predictions, over the threshold it is combined with: so new
ones and those of third parties appear.  `SWEPT` has those for which that is not right.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..cache import compose as compose_cache
from ..core.errors import ConfigError
from ..core.spec import info
from ..samplers import SAMPLERS, Info, available, compose
from .measure import Setting

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)  # of one step per position
TAUS = (0.99, 0.95, 0.9, 0.7, 0.5, 0.3)
BRACES = re.compile(r"\{([^{}]*)\}")
VALUE = re.compile(r"(?<==)[^(),]+|(?<=[(,])\s*[-.\d{][^(),]*")  # of an argument in a spec
ALONE = re.compile(r"\((\w+=)?\{\}\)")


@dataclass(frozen=True)
class SweptParameter:
    """A spec with one place ``{}`` and the values to put there; shares become numbers of steps."""

    spec: str
    values: Sequence[Any]

    def specs(self, canvas: int) -> list[str]:
        if self.values is not SHARES:
            return [self.spec.format(value) for value in self.values]
        return [self.spec.format(max(1, round(share * canvas))) for share in SHARES]


SWEPT: dict[str, SweptParameter] = {
    "random": SweptParameter("random+llada(steps={})", SHARES),
    "margin": SweptParameter("margin+llada(steps={})", SHARES),
    "neg_entropy": SweptParameter("neg_entropy+llada(steps={})", SHARES),
    "fixed": SweptParameter("fixed(n={})", (1, 2, 4, 8)),
    "factor": SweptParameter("factor(factor={})", (0.1, 0.25, 0.5, 1.0, 1.5, 2.0)),
    "dparallel": SweptParameter("dparallel(tau={})", (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)),
    "eotp": SweptParameter("threshold(tau={})+eotp", TAUS),
    "localleap": SweptParameter("localleap(tau_r={})", (0.9, 0.8, 0.75, 0.6, 0.5, 0.3)),
    "r2": SweptParameter("r2(spatial_threshold={})", (0.9, 0.8, 0.7, 0.6, 0.5)),
    "prophet": SweptParameter(
        "prophet({})",
        ("early=15.0,mid=10.0,late=5.0", "early=7.5,mid=5.0,late=2.5",
         "early=3.75,mid=2.5,late=1.25", "early=1.5,mid=1.0,late=0.5"),
    ),
    "freedave": SweptParameter("freedave(threshold(tau={}))", TAUS),
    "lopa": SweptParameter("lopa(threshold(tau={}))", TAUS),
}  # fmt: skip
BY_FIELD: dict[str, Sequence[Any]] = {
    "tau": TAUS, "threshold": TAUS, "gamma": (0.001, 0.01, 0.05, 0.1, 0.5, 1.0), "steps": SHARES,
}  # fmt: skip
OPTIONS = ("steps", "block_length", "eos_policy")  # arguments that are meant for samplers
WITHOUT = ("blocks", "prob", "eos")  # no curve of their own: parts of all that bring no other


def samplers_with_curves() -> list[str]:
    """Every registered sampler that is a method of its own and can be built, e.g. whose trained
    filter is there; in order of role and name."""
    names = [i.name for i in available() if i.name not in WITHOUT and i.role != "length"]
    return [name for name in names if composes(curve(name, 64)[0])]


def curve(name: str, canvas: int) -> list[str]:
    """Specs of a sampler's curve on a canvas of that many positions; those that cannot be composed
    are left out, and a sampler always has its defaults."""
    part = SAMPLERS[name]
    swept = SWEPT.get(name) or _derived(info(part, part.role))
    return [spec for spec in swept.specs(canvas) if composes(spec)] or [name]


def _derived(part: Info) -> SweptParameter:
    """The swept parameter of a sampler that `SWEPT` does not know."""
    for argument, values in BY_FIELD.items():
        if argument in part.defaults:
            return SweptParameter(f"{part.name}({argument}={{}})", values)
    if part.role == "selector":
        return SweptParameter(part.name, ("",))
    return SweptParameter(f"{part.name}+threshold(tau={{}})", TAUS)


def composes(spec: str, options: dict[str, Any] | None = None) -> bool:
    """Whether the parts that ``spec`` names go together, and take the options."""
    try:
        compose(spec, options=options)
    except ConfigError:
        return False
    return True


def spread(spec: str) -> Iterator[tuple[str, str]]:
    """``threshold(tau={0.5,0.9})`` stands for one spec per value in braces.

    Yields the curve that each is on and the spec.  A curve has no values in braces, but keeps what
    else they choose between: ``{eb,threshold}`` are two.
    """
    fixed, choices = BRACES.split(spec)[::2], BRACES.findall(spec)
    for values in product(*(choice.split(",") for choice in choices)):
        named, whole = fixed[0], fixed[0]
        for value, after in zip(map(str.strip, values), fixed[1:], strict=True):
            blank = whole.endswith("=") or value[:1] in "-.0123456789"
            named, whole = named + ("{}" if blank else value) + after, whole + value + after
        yield method_of(named), whole


def method_of(spec: str) -> str:
    """The curve of a spec whose chosen values are ``{}``.

    If no more than one argument has a value, as in ``lopa(threshold(tau=0.9))``, that value does
    not count: ``lopa(threshold)``.  Otherwise the given ones tell the curve from others.
    """
    single = len(VALUE.findall(spec)) <= 1
    return ALONE.sub("", VALUE.sub("{}", spec)) if single else spec


def settings(
    samplers: Sequence[str], curves: Sequence[str], caches: Sequence[str], arguments: dict[str, Any]
) -> list[Setting]:
    """Every combination, each once: specs as they are, names in ``curves`` as their curve.

    A sampler gets those of the ``arguments`` for samplers, e.g. ``block_length``, that it takes.
    """
    canvas = int(arguments.get("max_new_tokens", 64))
    chosen = [(name, spec) for name in curves for spec in curve(name, canvas)]
    chosen += [result for spec in samplers for result in spread(spec)]
    for _, spec in chosen:
        compose(spec)  # an unknown name is refused before anything is measured
    for cache in caches:
        compose_cache(cache)
    result = [
        Setting(
            method if cache == "none" else f"{method} · {cache}",
            spec,
            cache,
            {k: v for k, v in arguments.items() if k not in OPTIONS or composes(spec, {k: v})},
        )
        for cache, (method, spec) in product(caches, chosen)
    ]
    return list({(one.sampler, one.cache): one for one in reversed(result)}.values())[::-1]
