"""``dllm samplers`` and ``dllm caches``: what there is to choose from."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..core.errors import ConfigError, UnknownNameError
from ..core.spec import Info

DECIDES = {
    "selector": "which now",
    "course": "which now, in several steps of its own",
    "scorer": "how confident",
    "window": "where",
    "stop": "when to stop",
    "eos": "what an end token does",
    "transform": "what becomes of predictions",
    "reviser": "what to remask or replace",
    "explorer": "what to try first",
    "length": "how long the canvas is",
}

Name = Annotated[str | None, typer.Argument(help="One of them, with all it takes.")]
SAMPLER_EXAMPLE = "dllm generate PROMPT --sampler 'threshold(tau=0.8)+whole'"
CACHE_EXAMPLE = "dllm generate PROMPT --cache 'dual(refresh_every=4)'"


def samplers(name: Name = None) -> None:
    """List the parts samplers are made of, or explain one.

    A name alone is a complete sampler with the defaults of its paper; combine parts with '+'.
    """
    from ..cache import CACHES
    from ..samplers import available

    if name is not None:
        return _explain(name, available(), "sampler", "caches", CACHES)
    for role, group in groupby(available(), attrgetter("role")):
        _print(Text(f"{role}: {DECIDES.get(role, '')}", style="italic"))
        _lines(group)
        print()
    _print(Text(f"dllm samplers NAME explains one; e.g. {SAMPLER_EXAMPLE}", style="dim"))


def caches(name: Name = None) -> None:
    """List the caches, or explain one."""
    from ..cache import available
    from ..samplers import SAMPLERS

    if name is not None:
        return _explain(name, available(), "cache", "samplers", SAMPLERS)
    _lines(available())
    _print(Text(f"\ndllm caches NAME explains one; e.g. {CACHE_EXAMPLE}", style="dim"))


def _lines(infos: Iterable[Info]) -> None:
    """One line each: cut at the edge of a terminal, whole in a file."""
    for info in infos:
        text = Text.assemble((f"{info.name:<18}", "bold"), info.summary.replace("``", ""))
        if sys.stdout.isatty():
            Console(highlight=False).print(text, no_wrap=True, overflow="ellipsis")
        else:
            _print(text)


def _explain(
    name: str, infos: Iterable[Info], kind: str, elsewhere: str, others: Iterable[str]
) -> None:
    """Everything about the one of that name."""
    known = {info.name: info for info in infos}
    if name not in known and name in others:
        raise ConfigError(f"{name} is in the other list: dllm {elsewhere} {name}")
    if name not in known:
        raise UnknownNameError(kind, name, known)
    info = known[name]
    kind = f"  {info.role}: {DECIDES.get(info.role, '')}" if info.role else ""
    _print(Text.assemble((info.name, "bold"), (kind, "dim")))
    about = f"{info.summary}\n\n{info.about}".replace("``", "").strip()
    _print(Text(f"{about}\n"))
    facts = {
        "paper": f"{info.paper}, arXiv {info.arxiv}" if info.arxiv else info.paper,
        "needs": ", ".join(info.needs),
        "offers": ", ".join(info.offers),
        "defaults": ", ".join(_settings(info.defaults)),
    }
    for name, text in facts.items():
        if text:
            _print(Text.assemble((f"{name:<10}", "dim"), text))


def _settings(defaults: Mapping[str, Any]) -> Iterable[str]:
    """Arguments with their defaults; one that is open is set by the model or by other parts."""
    for name, value in defaults.items():
        if value is MISSING:
            yield f"{name} (required)"
        else:
            yield f"{name} (open)" if value in (None, ()) else f"{name}={value}"


def _print(text: Text) -> None:
    Console(highlight=False).print(text, soft_wrap=True)
