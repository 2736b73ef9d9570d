"""The process in which structures are read and compiled: it can be ended at any moment without
harm to the program that asked.

One process serves a program.  It starts with the first structure, keeps the prefix trees of the
vocabularies it was sent, and ends with the program.  What a structure may take is counted in steps
and bytes, so that a busy machine refuses nothing that an idle one takes.
"""

import atexit
import contextlib
import hashlib
import io
import json
import os
import subprocess
import threading
import time
import warnings
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ..core.child import command
from ..core.errors import ConfigError
from . import compiling
from .compiling import MEMORY, OK, WRONG, Tables, receive, send
from .source import Source, encoded, named
from .vocabulary import Vocabulary

SECONDS = 120.0  # of processor time, after which the process counts as hung
START_SECONDS = 60.0  # for the process, and for each vocabulary
SLOW = 0.5  # seconds from which on what was compiled is stored
MOST = 64  # automata that are stored


def read(data: bytes) -> Tables:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        found: Any = {n: x if (x := arrays[n]).ndim else int(x) for n in arrays.files}
    return Tables(**found)


def stored(text: str, vocabulary: Vocabulary) -> Path | None:
    """Where an automaton that took long to compile is kept: in the folder ``DLLM_FORMATS``, else in
    the user's folder for caches.  It can be deleted at any time.  None: nowhere."""
    named = os.environ.get("DLLM_FORMATS")
    if named == "":
        return None
    try:
        folder = Path(named or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home
        return None
    key = hashlib.sha256(repr((compiling.VERSION, vocabulary.key, text)).encode()).hexdigest()
    return (folder if named else folder / "dllm" / "formats") / f"{key}.npz"


def keep(file: Path, data: bytes) -> None:
    """Store what was compiled in place of what was stored longest ago."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(data)
        part.replace(file)
        for old in sorted(file.parent.glob("*.npz"), key=os.path.getmtime)[:-MOST]:
            old.unlink(missing_ok=True)


def _told(tables: Tables) -> Tables:
    """The same, with a warning where keywords of a schema are unknown."""
    if tables.ignored.size:
        warnings.warn(
            "the schema has keywords that say nothing about values here, which are ignored: "
            + ", ".join(tables.ignored.tolist()), stacklevel=2,
        )  # fmt: skip
    return tables


class RefusedError(ConfigError):
    """A source that has no automaton.  ``shortest``: a text of it, ``source``: the same texts in
    words that every dialect reads alike; None where there is none."""

    def __init__(
        self, message: str, shortest: str | None = None, source: Source | None = None
    ) -> None:
        super().__init__(message)
        self.shortest = None if shortest is None else bytes.fromhex(shortest)
        self.source = source


class Worker:
    """Compiles structures in a process of its own, one at a time."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._known: set[str] = set()
        self._owner = 0
        self._lock = threading.Lock()
        atexit.register(self.close)

    def compile(self, source: Source, vocabulary: Vocabulary) -> Tables:
        """The automaton of ``source`` over the tokens of ``vocabulary``.

        Raises `ConfigError` where it is not understood or exceeds a limit.
        """
        text = encoded(source)
        file = stored(text, vocabulary)
        if file is not None:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, BadZipFile):
                return _told(read(file.read_bytes()))
        with self._lock:
            self._running()
            if vocabulary.key not in self._known:
                pieces = [piece and piece.hex() for piece in vocabulary.pieces]
                if self._ask({"key": vocabulary.key, "pieces": pieces}, START_SECONDS) is None:
                    raise ConfigError("the process that compiles structures does not start")
                self._known.add(vocabulary.key)
            began = time.monotonic()
            answer = self._ask({"source": source, "key": vocabulary.key}, self.seconds)
        if answer is None:
            raise ConfigError(
                f"{named(source)} was given up: the process that compiles it ended, or took more "
                f"than {MEMORY >> 30} GB or {self.seconds:g} s of processor time"
            )
        if answer[:1] != OK:
            why, known = json.loads(answer[1:])
            told = "" if answer[:1] == WRONG else f"{named(source)} "
            raise RefusedError(told + why, **known)
        if file is not None and time.monotonic() - began > SLOW:
            keep(file, answer[1:])
        return _told(read(answer[1:]))

    def close(self) -> None:
        """End the process; what it compiles is given up."""
        if (process := self._process) is not None and self._owner == os.getpid():
            process.kill()
        with self._lock:
            self._end()

    def _running(self) -> None:
        """Make sure that there is a process."""
        if (
            self._process is not None
            and self._process.poll() is None
            and self._owner == os.getpid()
        ):
            return
        self._end()
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            command(compiling.__name__, "serve"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def _ask(self, request: dict[str, Any], seconds: float) -> bytes | None:
        """What the process answers; None where it ended first, at the latest after ``seconds`` of
        processor time."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            send(process.stdin, json.dumps({**request, "seconds": seconds}).encode())
            return receive(process.stdout)
        except (OSError, EOFError):
            self._end()
            return None

    def _end(self) -> None:
        process, self._process = self._process, None
        self._known.clear()
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        process.wait()
