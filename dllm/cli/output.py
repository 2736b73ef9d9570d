"""What commands print: answers and JSON on stdout, everything else on stderr."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from .. import __version__
from ..core.errors import ConfigError

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..runtime.result import Result

USAGE_ERROR = 2  # exit status
DEBUG = "dllm.debug"  # key in the meta of a command line's context, which nested contexts share
# Escape sequences from a model must not reach the terminal; line breaks and tabs may.
CONTROLS = {i: 0x2400 + i for i in range(32) if chr(i) not in "\n\t"} | {127: 0x2421}
CONTROLS |= dict.fromkeys(range(128, 160), 0xFFFD)
MEASURED = ("text", "tokens", "nfe", "computed", "forced", "tokens_per_forward",
            "tokens_per_second", "seconds", "peak_memory", "finish_reason", "prompt_length",
            "sampler", "cache", "seed")  # fmt: skip


def remember_debug(ctx: typer.Context, value: bool) -> bool:
    """Callback of ``--debug``, wherever on the command line it stands."""
    if value:
        ctx.meta[DEBUG] = True
    return value


def stderr() -> Console:
    """A console on the present stderr that leaves text as it is."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def shown(text: str) -> str:
    """What a model wrote, for stdout: on a terminal without escape sequences."""
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


def interactive() -> bool:
    """Whether stderr is a terminal that can redraw."""
    console = stderr()
    return sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show ``text`` with a spinner on a terminal, nothing elsewhere.

    What is imported for the first time takes seconds, so imports belong inside as well.
    """
    if not interactive():
        yield
        return
    with stderr().status(f"{text} ..."):
        yield


def note(text: str) -> None:
    """A dim line on stderr."""
    stderr().print(text, style="dim", markup=False)


class Ticker:
    """Lines of progress where stderr is no terminal, at most one every ``every`` seconds."""

    def __init__(self, every: float = 10.0) -> None:
        self.every, self.again = every, time.monotonic() + every

    def tell(self, text: str) -> None:
        """Say ``text``, if it is time to."""
        if not interactive() and time.monotonic() >= self.again:
            self.again = time.monotonic() + self.every
            note(text)


def complain(error: Exception | str) -> None:
    """One line on stderr that says what went wrong."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        about = f"{error.filename}: " if error.filename else ""
        text = about + error.strerror
    message = " ".join(line.strip() for line in text.splitlines())
    print(f"error: {message}", file=sys.stderr)


def check_output(file: Path, what: str = "") -> None:
    """Raise `ConfigError` now rather than after the work if ``file`` cannot be written."""
    new = not file.exists()
    if not new and not (file.is_file() or file.is_dir()):  # a pipe or a device
        return
    try:
        file.open("ab").close()
    except OSError as error:
        raise ConfigError(
            f"cannot write {what}to {file} ({error.strerror}): name a file in an existing folder"
        ) from error
    if new:
        file.unlink()


def distribution_version(name: str) -> str | None:
    """Version of an installed distribution, without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """What has to be known to repeat a run."""
    result = {name: distribution_version(name) for name in ("torch", "transformers", "numpy")}
    return {"dllm": __version__, "python": platform.python_version(), **result}


def as_json(result: Result, model: DiffusionModel, about: Mapping[str, Any] | None = None) -> str:
    """One line of JSON: ``about`` what was asked, text, figures, and what determined them."""
    payload: dict[str, Any] = dict(about or {})
    payload |= {name: getattr(result, name) for name in MEASURED}
    dtype = str(model.dtype).removeprefix("torch.")
    payload |= {"model": model.name, "dtype": dtype, "device": str(model.device)}
    return json.dumps(payload | {"versions": versions()}, ensure_ascii=False)


def trace_files(file: Path | None, rows: int) -> list[Path]:
    """Where to write the trace of each row: ``file``, or ``name-0.json`` ... for several.

    Raises `ConfigError` now rather than after the generation when that cannot work.
    """
    if file is None:
        return []
    named = [file.with_name(f"{file.stem}-{row}{file.suffix}") for row in range(rows)]
    files = [file] if rows == 1 else named
    for each in files:
        check_output(each, "the trace ")
    return files


def save_trace(result: Result, file: Path) -> None:
    """Write the trace that was asked for, as a page or JSON."""
    from ..eval.page import trace_page

    assert result.trace is not None
    try:
        if file.suffix == ".html":
            file.write_text(trace_page([result.trace.to_dict()], file.stem), encoding="utf-8")
        else:
            result.trace.save(file)
    except OSError as error:
        raise ConfigError(f"cannot write the trace to {file}: {error.strerror}") from error
