"""Processes of Python that this one starts."""

import math
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from .errors import CancelledError

T = TypeVar("T")


def command(module: str, function: str, *arguments: str) -> list[str]:
    """A Python that finds modules where this one does, and calls ``function`` of ``module``.

    The path is set after it has started, the standard library first: a folder may hold ``enum.py``.
    """
    library = os.path.dirname(os.__file__)
    path = [folder or os.getcwd() for folder in sys.path]
    path.sort(key=lambda folder: not folder.startswith(library) or "-packages" in folder)
    start = f"import sys; sys.path[:] = {path}; from {module} import {function}; {function}()"
    return [sys.executable, "-c", start, *arguments]


def limit(seconds: float, memory: int) -> None:
    """Allow this process so much more processor time, and so many bytes of its own.

    Windows has no such limits.  macOS refuses one of memory: it counts the system's libraries.
    """
    with suppress(ImportError, ValueError):
        import resource

        ends = math.ceil(time.process_time() + seconds)
        for what, most in ((resource.RLIMIT_CPU, ends), (resource.RLIMIT_DATA, memory)):
            hard = resource.getrlimit(what)[1]
            resource.setrlimit(what, (most if hard < 0 else min(most, hard), hard))


class Child:
    """A process that calls functions for this one, one at a time.

    It starts with the first call, and again where it has ended, or this process is a fork of the
    one that started it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()
        self._closed = False

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What ``function``, which has a name in a module, returns there, or raises.

        Raises `ChildProcessError` where the process ends, `CancelledError` where it is closed.
        """
        with self._lock:
            if not self._owned() or self._process is None or self._process.poll() is not None:
                self._end()
                self._owner = os.getpid()
                self._process = subprocess.Popen(
                    command(__name__, "answer"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                    start_new_session=True,  # a terminal's Ctrl-C is for this process
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # Windows
                )  # fmt: skip
            asked, answers = self._process.stdin, self._process.stdout
            assert asked is not None and answers is not None
            try:
                if self._closed:
                    raise EOFError
                pickle.dump((function, arguments), asked)
                asked.flush()
                done, result = pickle.load(answers)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                self._end()
                if self._closed:
                    raise CancelledError(f"{function.__name__} was ended") from error
                raise ChildProcessError(f"the process of {function.__name__} ended") from error
        if not done:
            raise result
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process; a call that runs raises."""
        self._closed = True
        if (process := self._process) is not None and self._owned():
            process.kill()
        with self._lock:
            self._end()

    def _owned(self) -> bool:
        return self._owner == os.getpid()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owned():
            process.kill()
            process.communicate()


def answer() -> None:
    """What the process does: calls on stdin, results on stdout, until stdin ends."""
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result = True, function(*arguments)
        except Exception as error:
            error.add_note(traceback.format_exc())
            result = False, error
        pickle.dump(result, sys.stdout.buffer)
        sys.stdout.flush()
