"""Expressions that would never be done, and what they leave behind."""

from __future__ import annotations

import threading

import pytest

from dllm.errors import ConfigError
from dllm.formats.vocabulary import Vocabulary
from dllm.formats.worker import Worker

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
