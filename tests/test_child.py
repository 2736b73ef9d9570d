"""A process that calls functions for this one."""

import math
import os
import resource
import subprocess
import sys
import threading
import time

import pytest

from dllm.core.child import Child, limit
from dllm.core.errors import CancelledError


def test_calls_return_raise_and_end_the_process() -> None:
    child = Child()
    try:
        assert child.call(math.hypot, 3, 4) == 5
        first = child.call(os.getpid)
        assert first == child.call(os.getpid) != os.getpid()
        with pytest.raises(ZeroDivisionError) as caught:
            child.call(divmod, 1, 0)
        assert "Traceback" in caught.value.__notes__[0]
        with pytest.raises(ChildProcessError, match="_exit"):
            child.call(os._exit, 0)
        assert child.call(os.getpid) not in (first, os.getpid())
    finally:
        child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_fork_leaves_the_process_to_the_one_that_started_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = Child()
    first, process, own = child.call(os.getpid), child._process, os.getpid()
    assert process is not None
    try:
        monkeypatch.setattr(os, "getpid", lambda: own + 1)
        child.close()
        assert process.poll() is None
        child = Child()
        child._process, child._owner = process, own
        second = child.call(os.getppid)
        assert second == own and child._process is not process and process.poll() is None
    finally:
        child.close()
        process.communicate()
    assert first != own


def test_closing_ends_a_call() -> None:
    child, caught, running = Child(), list[BaseException](), threading.Event()

    def wait() -> None:
        running.set()
        with pytest.raises(CancelledError) as error:
            child.call(time.sleep, 3600)
        caught.append(error.value)

    child.call(os.getpid)
    thread = threading.Thread(target=wait)
    thread.start()
    running.wait()
    while not child._lock.locked():
        pass
    child.close()
    thread.join()
    assert len(caught) == 1


def test_limits_are_set_where_the_system_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS refuses those of memory, and Windows has none."""
    asked = []

    def refuse(what: int, most: tuple[int, int]) -> None:
        asked.append(what)
        if what != resource.RLIMIT_CPU:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    limit(10.0, 4 << 30)
    assert asked == [resource.RLIMIT_CPU, resource.RLIMIT_DATA]
    monkeypatch.setitem(sys.modules, "resource", None)
    limit(10.0, 4 << 30)
    assert len(asked) == 2


def test_ctrl_c_of_a_windows_terminal_is_for_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches all processes of a group; Linux refuses the flag of a new one."""
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 512, raising=False)
    with pytest.raises(ValueError, match="creationflags"):
        Child().call(os.getpid)
