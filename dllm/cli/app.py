"""The ``dllm`` application: commands, imported when they are called, and how errors leave it."""

import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..core.errors import DllmError, missing_module
from .output import DEBUG, USAGE_ERROR, complain, remember_debug

INTERRUPTED, TERMINATED = 130, 143
UsageError: Any = typer.BadParameter.__base__  # some versions of typer bring their own click

# Group: name, and what the list of commands says.
COMMANDS = {
    "Run": {
        "generate": "Answer a prompt, or a file of prompts.",
        "chat": "Talk to a model.",
        "infill": "Fill the holes of a text.",
        "serve": "Serve a model over HTTP (OpenAI's API).",
        "batch": "Answer a file of requests.",
    },
    "Choose": {
        "samplers": "List the samplers, or explain one.",
        "caches": "List the caches, or explain one.",
        "doctor": "Check this machine, and whether a model fits.",
        "compare": "Answer one prompt with several samplers and caches.",
    },
    "Measure and train": {
        "bench": "Measure accuracy and speed of samplers and caches.",
        "eval": "Run tasks of lm-evaluation-harness.",
        "train": "Train drafters, and adapt diffusion models.",
    },
}
ELSEWHERE = {"samplers": "listing", "caches": "listing", "eval": "evaluate"}  # modules


@functools.cache
def command_of(name: str) -> Any:
    """The command itself, with all that it imports."""
    from .options import everywhere

    module = import_module(f".{ELSEWHERE.get(name, name)}", __package__)
    if name == "train":
        return typer.main.get_command(module.train_app)
    function = getattr(module, "evaluate" if name == "eval" else name)
    alone = typer.Typer(add_completion=False)
    alone.command(name)(everywhere(function, getattr(module, "SHOWN", ())))
    return typer.main.get_command(alone)


class Commands(TyperGroup):
    """Runs a command; what goes wrong outside this program becomes one line on stderr."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with reported({}):
            return super().make_context(*args, **extra)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, command_of(name) if name and listed else listed, rest

    def invoke(self, ctx: Any) -> Any:
        with reported(ctx.meta), ended_by_sigterm():
            return super().invoke(ctx)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command in the same order as Ctrl-C."""


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises `Terminated`; servers put handlers of their own in its place."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    own = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() != own:  # a pool's worker, forked off by what a command runs
            os._exit(TERMINATED)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def reported(meta: dict[str, Any]) -> Iterator[None]:
    """Errors of users and of their files and devices leave as one line, and status 2."""
    try:
        yield
    except Terminated:
        complain("ended by SIGTERM")
        raise typer.Exit(TERMINATED) from None
    except KeyboardInterrupt:
        print(file=sys.stderr)  # after the ^C of the terminal
        raise typer.Exit(INTERRUPTED) from None
    except UsageError as error:
        if type(error).show is not UsageError.show:  # no arguments: the help page
            raise
        where = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        complain(f"{error.format_message().rstrip('.')}{where}")
        raise typer.Exit(USAGE_ERROR) from None
    except BrokenPipeError:  # who reads the output has enough
        raise
    except (DllmError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError):  # of an extra that is not installed
            told = missing_module(error)
            if told is None:
                raise
            error = told
        if meta.get(DEBUG):
            traceback.print_exc()
        complain(error)
        raise typer.Exit(USAGE_ERROR) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"dllm {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    name="dllm",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", callback=remember_debug, help="Show tracebacks of errors.")
    ] = False,
) -> None:
    """Try: dllm compare -s llada -s localleap "Reverse this list: Tom, Anna, Ben"

    A runtime for masked-diffusion language models.
    """


def _listed() -> None:
    """What stands in the list for a command; `Commands` runs the command itself."""


for group, names in COMMANDS.items():
    for name, says in names.items():
        app.command(name, help=says, rich_help_panel=group)(_listed)
