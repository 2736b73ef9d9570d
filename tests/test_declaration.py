"""Every parameter is declared once: what users can pass is found in the declaration, or is an
option or a field of one command or one request alone."""

from collections.abc import Iterator
from typing import Any

import click
import pytest

from dllm.cli.app import COMMANDS, command_of
from dllm.core.config import GenerationConfig, SessionConfig
from dllm.core.declared import Declared, about_of
from dllm.serve import bodies
from dllm.serve.body import Body
from dllm.serve.settings import Settings
from dllm.serve.words import wire_names

DECLARED: tuple[type[Declared], ...] = (GenerationConfig, SessionConfig, Settings)

# Parts, which commands complete by name, and what belongs to where a server listens.
PARTS = ("sampler", "cache", "drafter", "rule", "controller", "name", "api_key")


def options(command: Any, path: str) -> Iterator[tuple[str, click.Option]]:
    """Every option of a command and of those below it, with where it stands."""
    for inner in getattr(command, "commands", {}).values():
        yield from options(inner, f"{path} {inner.name}")
    for one in command.params:
        if isinstance(one, click.Option):
            yield path, one


@pytest.mark.parametrize("name", [name for group in COMMANDS.values() for name in group])
def test_an_option_says_what_its_declaration_says(name: str) -> None:
    told: dict[str, list[str]] = {}
    for kind in DECLARED:
        for field, info in kind.fields().items():
            about = about_of(info)
            told.setdefault(about.flag or field, []).append(about.says.partition(".  ")[0])
    for where, option in options(command_of(name), name):
        assert option.help, f"{where}: {option.opts} says nothing"
        first = told.get(str(option.name))
        if first is not None and option.name not in PARTS:
            said = any(option.help.startswith(one.rstrip(".")) for one in first)
            assert said, (where, option.help)


def test_a_field_of_a_body_is_declared_once() -> None:
    """A body names which parameters it takes; it has none of them as a field of its own."""
    wires = wire_names(tuple(GenerationConfig.fields()))
    for body in vars(bodies).values():
        if not (isinstance(body, type) and issubclass(body, Body)):
            continue
        assert {*body.TAKES} <= GenerationConfig.fields().keys(), body
        twice = body.own() & {wire for wire, name in wires.items() if name in body.TAKES}
        assert not twice, (body, twice)
        assert not body.own() & body.REFUSED.keys(), body
