"""Expressions that would never be done, and what they leave behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dllm.core.errors import ConfigError
from dllm.structured import worker as module
from dllm.structured.vocabulary import Vocabulary
from dllm.structured.worker import Worker

from .toy import PIECES

VOCABULARY = Vocabulary(PIECES, False, "toy")


def test_a_hostile_expression_is_given_up_and_the_next_one_is_not() -> None:
    worker = Worker(seconds=1.0)
    try:
        assert worker.compile("ab*", VOCABULARY).start >= 0
        first = worker._process
        with pytest.raises(ConfigError, match="was given up: compiling took more than 1 s"):
            worker.compile("(a|b)*a(a|b){30}", VOCABULARY)
        assert first is not None and first.poll() is not None
        assert worker.compile("ab*", VOCABULARY).start >= 0
        assert worker._process is not None and worker._process is not first
    finally:
        worker.close()
    assert worker._process is None


def test_limits_and_errors_leave_the_process_alone() -> None:
    worker = Worker()
    try:
        worker.compile("a", VOCABULARY)
        first = worker._process
        with pytest.raises(ConfigError, match="states, at most 4096 are taken"):
            worker.compile("(a|b)*a(a|b){12}", VOCABULARY)
        with pytest.raises(ConfigError, match="is not understood"):
            worker.compile("a{2", VOCABULARY)
        worker.compile("b", VOCABULARY)
        assert worker._process is first, "one process for all of them"
    finally:
        worker.close()


def test_several_threads() -> None:
    worker = Worker()
    result: dict[int, int] = {}

    def ask(n: int) -> None:
        result[n] = len(worker.compile(f"a{{{n}}}", VOCABULARY).accepting)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(1, 9)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        worker.close()
    assert result.keys() == set(range(1, 9)) and result[8] > result[1]


def test_what_took_long_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program finds it, a damaged file is replaced, and only so many are kept."""
    monkeypatch.setenv("DLLM_FORMATS", str(tmp_path))
    monkeypatch.setattr(module, "SLOW", 0.0)
    monkeypatch.setattr(module, "MOST", 2)
    first, second = Worker(), Worker()
    try:
        tables = first.compile("ab*", VOCABULARY)
        (file,) = tmp_path.iterdir()
        again = second.compile("ab*", VOCABULARY)
        assert second._process is None, "nothing was compiled"
        assert (again.next == tables.next).all() and again.start == tables.start
        file.write_bytes(b"PK damaged")
        assert (second.compile("ab*", VOCABULARY).of == tables.of).all()
        assert second._process is not None and len(file.read_bytes()) > 100
        for pattern in ("a", "b", "(ab)+"):
            first.compile(pattern, VOCABULARY)
        assert len(list(tmp_path.iterdir())) == 2
        monkeypatch.setenv("DLLM_FORMATS", str(file))  # no folder: nothing is stored, nothing lost
        assert first.compile("aa", VOCABULARY).start >= 0
    finally:
        first.close()
        second.close()
