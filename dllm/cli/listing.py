"""``dllm samplers`` and ``dllm caches``: what there is to choose from."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..core.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
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

SAMPLER_EXAMPLE = "dllm generate PROMPT --sampler 'threshold(tau=0.8)+whole'"
CACHE_EXAMPLE = "dllm generate PROMPT --cache 'dual(refresh_every=4)'"


def samplers(
    name: Annotated[
        str | None,
        typer.Argument(help="One of them, with all it takes."),
    ] = None,
) -> None:
    """List the parts samplers are made of, or explain one.

    A name alone is a complete sampler with the defaults of its paper; combine parts with '+'.
    """
    from ..cache import CACHES
    from ..samplers import available

    infos = _named(name, available(), "sampler", "caches", CACHES)
    if name is None:
        for role, group in groupby(infos, attrgetter("role")):
            _print(Text(f"{role}: {DECIDES.get(role, '')}", style="italic"))
            _lines(group)
            print()
        _print(Text(f"dllm samplers NAME explains one; e.g. {SAMPLER_EXAMPLE}", style="dim"))
    else:
        _explain(infos[0])


def caches(
    name: Annotated[
        str | None,
        typer.Argument(help="One of them, with all it takes."),
    ] = None,
) -> None:
    """List the caches, or explain one."""
    from ..cache import available
    from ..samplers import SAMPLERS

    infos = _named(name, available(), "cache", "samplers", SAMPLERS)
    if name is None:
        _lines(infos)
        _print(Text(f"\ndllm caches NAME explains one; e.g. {CACHE_EXAMPLE}", style="dim"))
    else:
        _explain(infos[0])


def _named(
    name: str | None, infos: Sequence[Info], kind: str, elsewhere: str, others: Iterable[str]
) -> list[Info]:
    """All of them, or the one of that name."""
    if name is None or name in (known := [info.name for info in infos]):
        return [info for info in infos if name in (None, info.name)]
    if name in others:
        raise ConfigError(f"{name} is in the other list: dllm {elsewhere} {name}")
    raise UnknownNameError(kind, name, known)


def _lines(infos: Iterable[Info]) -> None:
    """One line each: cut at the edge of a terminal, whole in a file."""
    for info in infos:
        text = Text.assemble((f"{info.name:<18}", "bold"), info.summary.replace("``", ""))
        if sys.stdout.isatty():
            _console().print(text, no_wrap=True, overflow="ellipsis")
        else:
            _print(text)


def _explain(info: Info) -> None:
    """Everything about one."""
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
        elif value in (None, ()):
            yield f"{name} (open)"
        else:
            yield f"{name}={value}"


def _print(text: Text) -> None:
    _console().print(text, soft_wrap=True)


def _console() -> Console:
    return Console(highlight=False)
