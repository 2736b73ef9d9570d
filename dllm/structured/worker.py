"""The process in which expressions are compiled: one that takes too long, or too much memory, can
be ended without harm to the program that asked.

One process serves a program.  It starts with the first expression, keeps the prefix trees of the
vocabularies it was sent, and ends with the program.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ..core.errors import ConfigError, missing, short
from . import compiling
from .compiling import MEMORY, OK, Tables, receive, send
from .vocabulary import Vocabulary

SECONDS = 10.0  # for an expression
START_SECONDS = 60.0  # for the process, and for each vocabulary
SLOW = 0.5  # seconds from which on what was compiled is stored
MOST = 64  # automata that are stored


def read(data: bytes) -> Tables:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        found: Any = {n: x if (x := arrays[n]).ndim else int(x) for n in arrays.files}
    return Tables(**found)


def stored(pattern: str, vocabulary: Vocabulary) -> Path | None:
    """Where an automaton that took long to compile is kept: in the folder ``DLLM_FORMATS``, else in
    the user's folder for caches.  It can be deleted at any time.  None: nowhere."""
    named = os.environ.get("DLLM_FORMATS")
    if named == "":
        return None
    try:
        folder = Path(named or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home
        return None
    key = hashlib.sha256(repr((compiling.VERSION, vocabulary.key, pattern)).encode()).hexdigest()
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


class Worker:
    """Compiles expressions in a process of its own, one at a time."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._known: set[str] = set()
        self._owner = 0
        self._lock = threading.Lock()
        atexit.register(self.close)

    def compile(self, pattern: str, vocabulary: Vocabulary) -> Tables:
        """The automaton of ``pattern`` over the tokens of ``vocabulary``.

        Raises `ConfigError` where it is not understood or exceeds a limit.
        """
        file = stored(pattern, vocabulary)
        if file is not None:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, BadZipFile):
                return read(file.read_bytes())
        request = {"pattern": pattern, "key": vocabulary.key}
        with self._lock:
            self._running()
            if vocabulary.key not in self._known:
                pieces = [piece and piece.hex() for piece in vocabulary.pieces]
                if self._ask({"key": vocabulary.key, "pieces": pieces}, START_SECONDS) is None:
                    raise ConfigError("the process that compiles expressions does not start")
                self._known.add(vocabulary.key)
            began = time.monotonic()
            answer = self._ask(request, self.seconds)
        if answer is None:
            raise ConfigError(
                f"the expression {short(pattern)} was given up: compiling took more than "
                f"{self.seconds:g} s or {MEMORY >> 30} GB; write repetitions and alternatives "
                "with fewer ways to match"
            )
        if answer[:1] != OK:
            raise ConfigError(f"the expression {short(pattern)} {answer[1:].decode()}")
        if file is not None and time.monotonic() - began > SLOW:
            keep(file, answer[1:])
        return read(answer[1:])

    def close(self) -> None:
        """End the process."""
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
        if find_spec("outlines_core") is None:
            raise missing("outlines-core, which compiles formats,", "structured")
        self._end()
        self._owner = os.getpid()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", compiling.__file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip

    def _ask(self, request: dict[str, Any], seconds: float) -> bytes | None:
        """What the process answers; None where it ended first, at the latest after ``seconds``."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.daemon = True
        timer.start()
        try:
            send(process.stdin, json.dumps(request).encode())
            return receive(process.stdout)
        except (OSError, EOFError):
            self._end()
            return None
        finally:
            timer.cancel()

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
