"""How many threads are taken, and that what somebody has decided stays."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import dllm
from dllm.models import threads


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, float]]:
    """A machine of eight processors where nobody has said anything; the times it measures."""
    times = {1: 4.0, 2: 2.1, 4: 1.5, 8: 1.45}
    before = torch.get_num_threads()
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in (("_largest", 0), ("_ours", None), ("_fixed", False)):
        monkeypatch.setattr(threads, name, value)
    monkeypatch.setattr(threads, "available", lambda: 8)
    monkeypatch.setattr(threads, "measure", lambda *given: times)
    torch.set_num_threads(8)
    yield times
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({1: 1.0, 2: 0.97}, 1),
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.6}, 2),
        ({1: 4.0, 2: 2.1, 4: 1.5, 8: 1.45}, 4),
        ({1: 1.0, 2: 3.0, 4: 0.5}, 4),
        ({1: 0.4, 2: 48.0}, 1),
    ],
)
def test_the_fewest_that_are_hardly_beaten(times: dict[int, float], chosen: int) -> None:
    assert threads.best(times) == chosen


def test_a_model_is_timed_once_and_the_log_says_so(
    undecided: dict[int, float], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dllm"):
        model = dllm.load("nano")
        dllm.load("nano")
    lines = [line for line in caplog.messages if "threads" in line]
    assert len(lines) == 1 and lines[0].startswith("4 of 8 threads")
    assert torch.get_num_threads() == 4
    with ThreadPoolExecutor(1) as other:  # as a session's
        assert other.submit(torch.get_num_threads).result() == 4
    undecided.update({1: 0.1})
    dllm.load(model.hf, family="llada", mask_token_id=model.facts.mask_token_id)
    assert torch.get_num_threads() == 4  # the sizes were timed already


@pytest.mark.parametrize("way", ["argument", "torch", "environment", "torch later"])
def test_what_somebody_decided_stays(
    way: str, undecided: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    if way == "argument":
        given["threads"] = 3
    elif way == "torch":
        torch.set_num_threads(3)
    elif way == "environment":
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        torch.set_num_threads(3)
    else:
        threads._largest, threads._ours = 1, 4
        torch.set_num_threads(3)
    dllm.load("nano", **given)
    assert torch.get_num_threads() == 3
    dllm.load("nano")
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2"])
def test_a_number_of_threads_is_one(count: Any) -> None:
    with pytest.raises(dllm.ConfigError, match="whole number from 1"):
        dllm.load("nano", threads=count)


@pytest.mark.parametrize(("processors", "counts"), [(2, {1, 2}), (3, {1, 3}), (4, {1, 2, 4})])
def test_one_thread_half_of_the_processors_and_all_are_timed(
    processors: int, counts: set[int]
) -> None:
    before = torch.get_num_threads()
    times = threads.measure((64, 128), torch.float32, processors)
    assert set(times) == counts and min(times.values()) > 0
    assert torch.get_num_threads() == before


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate 'What is 2 + 3?'", "samplers", "doctor"])
def test_every_command_takes_a_number(command: str) -> None:
    code = (
        f"import torch, shlex; from dllm.cli.app import app\ntry: app(shlex.split({command!r}) + "
    )
    code += (
        "['--threads', '1'])\nexcept SystemExit as end: print(torch.get_num_threads(), end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "1 0", done.stderr
