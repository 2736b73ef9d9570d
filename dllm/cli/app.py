"""The ``dllm`` application: its commands, and how errors leave it."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from ..core.errors import DllmError, missing_module
from .batch import batch
from .bench import bench
from .chat import chat
from .compare import compare
from .dflash import dflash
from .distill import COMMANDS
from .doctor import doctor
from .evaluate import evaluate
from .generate import generate
from .infill import infill
from .listing import caches, samplers
from .options import DEBUG, everywhere, remember_debug
from .output import USAGE_ERROR, complain
from .serve import serve
from .train import train_app
from .tune import tune

INTERRUPTED, TERMINATED = 130, 143
UsageError: Any = typer.BadParameter.__base__  # some versions of typer bring their own click


class Commands(TyperGroup):
    """Runs a command; what goes wrong outside this program becomes one line on stderr."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with reported({}):
            return super().make_context(*args, **extra)

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

    def end(*_: object) -> None:
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
    """A runtime for masked-diffusion language models.

    Try: dllm generate "Reverse this list: Tom, Anna, Ben" --watch
    """


for command in (
    generate, chat, infill, serve, batch, samplers, caches, doctor, compare, bench, tune,
):  # fmt: skip
    app.command()(everywhere(command))
app.command("eval")(everywhere(evaluate))
for train_command in (dflash, *COMMANDS):
    train_app.command()(everywhere(train_command))
app.add_typer(train_app, name="train")
