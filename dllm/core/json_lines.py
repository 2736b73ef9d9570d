"""Files of JSON lines: those that users bring, and those that an interrupted run goes on with."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ConfigError, short


def read_json_lines(path: Path, what: str) -> Iterator[tuple[str, Any]]:
    """(where, value) of every line that is not blank, such as ("line 3 of my.jsonl", {...}).

    Raises `ConfigError` where the file of ``what`` ("questions") is unreadable, empty or no JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the {what} in {path}: {error}") from error
    if not any(map(str.strip, lines)):
        raise ConfigError(f"{path} holds no {what}")
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"line {number} of {path}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where} is not JSON: {error}") from None


def check_same(where: str, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise `ConfigError` where what stands there was made with other settings."""
    for name, value in wanted.items():
        if there.get(name) != value:
            raise ConfigError(
                f"{where} was made with {name} {short(there.get(name))}, not {short(value)}: name "
                "another file, or give the same settings"
            )


def read_state(path: Path) -> Any:
    """The JSON object of a file that an interrupted run left; {} where it is not there or not
    whole."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_whole(path: Path, text: str) -> None:
    """Write a file that holds the old text or the new one, whatever happens meanwhile."""
    new = path.with_name(f"{path.name}.{os.getpid()}")  # other processes may write theirs
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)  # where the disk is full


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Whatever writing to ``path`` raises names it: a full disk names nothing."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def lock(opened: Any, path: Path) -> None:
    """Keep other runs from ``path`` until what is ``opened`` of it (a file, or a descriptor) is
    closed.  Raises `ConfigError` where one is at work."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock

        flock(opened, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another run writes to {path}: wait for it") from None
    except (ImportError, OSError):
        return  # Windows, or a file system without locks


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that runs append to; a last one that was cut off is removed from it."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("rb+") as file:
            file.truncate(len(whole))
    return whole.split(b"\n")[:-1]
