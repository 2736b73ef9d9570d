"""The process in which structures are read and compiled: it can be ended at any moment without
harm to the program that asked.

One process serves a program.  It starts with the first structure, keeps the prefix trees of the
vocabularies it was sent, and ends with the program.  What a structure may take is counted in steps
and bytes, so that a busy machine refuses nothing that an idle one takes.
"""

import atexit
import io
import json
import os
import subprocess
import threading
import warnings
from typing import Any

import numpy as np

from ..core.child import command
from ..core.errors import ConfigError
from . import compiling
from .compiling import MEMORY, OK, WRONG, Tables, receive, send
from .source import Source, named
from .vocabulary import Vocabulary

SECONDS = 120.0  # of processor time, after which the process counts as hung
START_SECONDS = 60.0  # for the process, and for each vocabulary


def read(data: bytes) -> Tables:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        found: Any = {n: x if (x := arrays[n]).ndim else int(x) for n in arrays.files}
    return Tables(**found)


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
        with self._lock:
            self._running()
            if vocabulary.key not in self._known:
                pieces = [piece and piece.hex() for piece in vocabulary.pieces]
                if self._ask({"key": vocabulary.key, "pieces": pieces}, START_SECONDS) is None:
                    raise ConfigError("the process that compiles structures does not start")
                self._known.add(vocabulary.key)
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
