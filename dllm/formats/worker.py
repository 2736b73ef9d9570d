"""The process in which expressions are compiled: one that takes too long, or too much memory, can
be ended without harm to the program that asked.

One process serves a program.  It starts with the first expression, keeps the prefix trees of the
vocabularies it was sent, and ends with the program.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import fields
from typing import IO, Any

import numpy as np

from ..errors import ConfigError, short
from .compiling import Level, Tables, Unfit, compile_tokens, prefix_tree
from .vocabulary import Vocabulary

SECONDS = 10.0
MEMORY = 4 << 30  # bytes of address space
RUN = "from dllm.formats.worker import serve; serve()"
OK, REFUSED = b"+", b"-"


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
        with self._lock:
            process = self._running()
            timer = threading.Timer(self.seconds + (not self._known), process.kill)
            timer.daemon = True
            timer.start()
            try:
                answer = self._ask(process, pattern, vocabulary)
            except (OSError, EOFError):
                self._end()
                raise ConfigError(
                    f"the expression {short(pattern)} was given up: compiling took more than "
                    f"{self.seconds:g} s or {MEMORY >> 30} GB; write repetitions and alternatives "
                    "with fewer ways to match"
                ) from None
            finally:
                timer.cancel()
        if answer[:1] != OK:
            raise ConfigError(f"the expression {short(pattern)} {answer[1:].decode()}")
        with np.load(io.BytesIO(answer[1:]), allow_pickle=False) as arrays:
            values = {name: arrays[name] for name in arrays.files}
        return Tables(**{n: x if x.ndim else int(x) for n, x in values.items()})

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            self._known.clear()
            self._owner = os.getpid()
            path = os.pathsep.join(p or os.getcwd() for p in sys.path)
            self._process = subprocess.Popen(
                [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
            )  # fmt: skip
        return self._process

    def _ask(self, process: subprocess.Popen[bytes], pattern: str, vocabulary: Vocabulary) -> bytes:
        assert process.stdin is not None and process.stdout is not None
        request: dict[str, Any] = {"pattern": pattern, "key": vocabulary.key}
        if vocabulary.key not in self._known:
            request["pieces"] = [piece and piece.hex() for piece in vocabulary.pieces]
        _send(process.stdin, json.dumps(request).encode())
        answer = _receive(process.stdout)
        self._known.add(vocabulary.key)
        return answer

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


def _send(stream: IO[bytes], data: bytes) -> None:
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> bytes:
    """The next message; raises `EOFError` where the other side is gone."""
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    (size,) = struct.unpack("<Q", head)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def serve() -> None:
    """What the process does: requests on stdin, answers on stdout, until stdin ends."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    trees: dict[str, tuple[list[bytes | None], list[Level]]] = {}
    while True:
        try:
            request = json.loads(_receive(sys.stdin.buffer))
        except EOFError:
            return
        if "pieces" in request:
            pieces = [None if p is None else bytes.fromhex(p) for p in request["pieces"]]
            trees[request["key"]] = pieces, prefix_tree(pieces)
        _send(sys.stdout.buffer, _answer(request["pattern"], *trees[request["key"]]))


def _answer(pattern: str, pieces: Sequence[bytes | None], tree: list[Level]) -> bytes:
    try:
        tables = compile_tokens(pattern, pieces, tree)
    except Unfit as error:
        return REFUSED + str(error).encode()
    except ValueError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[-1].removeprefix("error: ") if lines else "no reason given"
        return REFUSED + f"is not understood: {reason}".encode()
    out = io.BytesIO()
    np.savez(out, **{f.name: np.asarray(getattr(tables, f.name)) for f in fields(tables)})
    return OK + out.getvalue()
