"""``dllm samplers`` and ``dllm caches``: what there is to choose from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from ..cache import Info as CacheInfo
    from ..samplers import Info as SamplerInfo

DECIDES = {
    "selector": "which now",
    "scorer": "how sure",
    "window": "where",
    "stop": "when to stop",
    "eos": "what an end token does",
    "transform": "what becomes of predictions",
    "reviser": "what to take back",
    "explorer": "what to try first",
}

SAMPLER_EXAMPLE = "dllm generate PROMPT --sampler 'threshold(tau=0.8)+whole'"
CACHE_EXAMPLE = "dllm generate PROMPT --cache 'dual(refresh_every=4)'"

AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON list.")]


def samplers(as_json: AsJson = False) -> None:
    """List the parts samplers are made of.

    A name alone is a complete sampler with the defaults of its paper; combine parts with '+'.
    """
    from ..samplers import available

    infos = available()
    if as_json:
        print(json.dumps([_plain(asdict(info)) for info in infos], ensure_ascii=False))
        return
    table = _table()
    role = ""
    for info in infos:
        if info.role != role:
            role = info.role
            table.add_section()
            table.add_row(Text(role, style="italic"), Text(DECIDES.get(role, ""), style="italic"))
        _add(table, info, "needs", info.needs)
    _print(table, SAMPLER_EXAMPLE)


def caches(as_json: AsJson = False) -> None:
    """List the caches."""
    from ..cache import available

    infos = available()
    if as_json:
        print(json.dumps([_plain(asdict(info)) for info in infos], ensure_ascii=False))
        return
    table = _table()
    for info in infos:
        _add(table, info, "offers", info.offers)
    _print(table, CACHE_EXAMPLE)


def _table() -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("Name", no_wrap=True)
    table.add_column("What it does", ratio=1)
    table.add_column("Defaults", overflow="fold")
    return table


def _add(table: Table, info: SamplerInfo | CacheInfo, relation: str, others: Sequence[str]) -> None:
    paper = f"{info.paper}, arXiv {info.arxiv}" if info.arxiv else info.paper
    about = Text(info.summary.replace("``", ""))
    for line in filter(None, (paper, f"{relation} {', '.join(others)}" if others else "")):
        about.append(f"\n{line}", style="dim")
    table.add_row(Text(info.name, style="bold"), about, "\n".join(_settings(info.defaults)))


def _settings(defaults: Mapping[str, Any]) -> Iterable[str]:
    for name, value in defaults.items():
        yield name if value is MISSING else f"{name}={value}"


def _print(table: Table, example: str) -> None:
    console = Console(highlight=False)
    console.print(table)
    console.print(Text(f"e.g. {example}", style="dim"))


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: strict JSON has no infinity and no objects."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items() if item is not MISSING}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and abs(value) == float("inf"):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)
