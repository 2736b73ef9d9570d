"""What `rate` keeps between calls: used when it fits, ignored when it does not."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.drafting.length.memory import EVERY, MOST, VERSION, Memory, memory_file
from dllm.drafting.length.rate import REMEMBERED, Rate

from .test_control import tell

PROMPT = [5, 9, 33, 7, 9, 33, 50, 5, 9, 33, 7]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "rate.json"
    monkeypatch.setenv("DLLM_RATE", str(path))
    return path


def learned(memory: Memory, rounds: int = 60) -> Rate:
    """A drafter that never pays: a draft costs three tokens' seconds, nothing is accepted."""
    rate = Rate()
    rate.remember(memory)
    text: Any = rate.fresh()
    for i in range(rounds):
        k = 4 if i % 3 else 0
        tell(text, k, 0, seconds=0.01 * (1 + k / 2))
    rate.finished()
    return rate


def test_a_second_call_begins_with_what_the_first_learned(file: Path) -> None:
    memory = Memory(file, "a b")
    before = learned(memory)
    assert file.is_file() and json.loads(file.read_text())["version"] == VERSION
    again = Rate()
    again.remember(Memory(file, "a b"))
    x, seen = np.array([1.0, 4.0, 9.0]), np.full(4, 0.9)
    np.testing.assert_allclose(again.verify_seconds[0](x), before.verify_seconds[0](x), rtol=1e-9)
    np.testing.assert_allclose(again.acceptance(seen), before.acceptance(seen), atol=0.01)
    assert again.worth.mean == pytest.approx(before.worth.mean) and again.worth.mean < 0
    assert again.fresh().next(40, 10).length == 0  # it rests from the start: drafting lost time
    assert Rate().fresh().next(40, 10).length > 0
    other = Rate()
    other.remember(Memory(file, "a c"))
    assert not other.verify_seconds and not other.worth.drafts


def test_what_was_seen_often_can_be_forgotten(file: Path) -> None:
    rate = Rate()
    rate.acceptance.judged += 1e6
    rate.acceptance.accepted += 5e5
    rate.worth.add(0.1)
    rate.memory = Memory(file, "k")  # type: ignore[misc]
    rate.finished()
    again = Rate()
    again.remember(Memory(file, "k"))
    assert again.acceptance.judged.max() == REMEMBERED
    assert again.acceptance(np.full(2, 0.9))[0] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("content", [
    "", "[", "[]", "{}", "[" * 50_000, '{"version": 99, "entries": {"k": {}}}',
    '{"version": 2, "entries": []}', '{"version": 2, "entries": {"k": 3}}',
    '{"version": 2, "entries": {"k": {"accepted": "x"}}}',
    '{"version": 2, "entries": {"k": {"accepted": [[1]], "judged": [[1]], "verify": {}, '
    '"draft": [0,0,0,0,0], "worth": [1, 1, 1, 1]}}}',
])  # fmt: skip
def test_a_file_of_another_hand_is_ignored(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    rate = Rate()
    rate.remember(Memory(file, "k"))
    assert not rate.verify_seconds and not rate.worth.drafts
    assert rate.fresh().next(9, 9).length == 9
    learned(Memory(file, "other"))
    assert "other" in json.loads(file.read_text())["entries"]


def test_damaged_numbers_are_ignored(file: Path) -> None:
    learned(Memory(file, "k"))
    whole = json.loads(file.read_text())
    for name, value in (("verify", {"0": [[1, 2], {}]}), ("draft", [1, 2, None, 4, 5]),
                        ("worth", [1, 1, float("nan"), 0]), ("worth", [1]),
                        ("judged", [[-1.0]])):  # fmt: skip
        broken = json.loads(json.dumps(whole))
        broken["entries"]["k"][name] = value
        file.write_text(json.dumps(broken))
        rate = Rate()
        rate.remember(Memory(file, "k"))
        assert not rate.verify_seconds and not rate.acceptance.judged.any(), name


def test_the_file_stays_small_and_no_folder_is_no_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(MOST + 5):
        Memory(file, str(i)).write({"n": i})
    entries = json.loads(file.read_text())["entries"]
    assert len(entries) == MOST and str(MOST + 4) in entries and "0" not in entries
    one = Memory(file, "x")
    one.write({"n": 1})
    one.write({"n": 2})  # at once: not written again
    assert EVERY > 0 and one.read() == {"n": 1}
    blocked = Memory(Path("/proc/nothing/rate.json"), "k")
    blocked.write({})
    assert blocked.read() is None
    monkeypatch.setenv("DLLM_RATE", "")
    assert memory_file() is None
    monkeypatch.setenv("DLLM_RATE", os.devnull)  # would be replaced by a file
    assert memory_file() is None
    monkeypatch.delenv("DLLM_RATE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert memory_file() == Path("/somewhere/dllm/rate.json")


def test_calls_share_it_and_write_the_same_text(file: Path, verifier: dllm.DiffusionModel) -> None:
    plain = dllm.speculate(verifier, None, PROMPT, max_new_tokens=24)
    assert not file.exists()  # nothing drafts
    for _ in range(2):
        assert dllm.speculate(verifier, "suffix", PROMPT, max_new_tokens=24).tokens == plain.tokens
    (key,) = json.loads(file.read_text())["entries"]
    assert "Suffix" in key and str(torch.get_num_threads()) in key
    dllm.speculate(verifier, "suffix", PROMPT, max_new_tokens=24, temperature=0.7)
    assert len(json.loads(file.read_text())["entries"]) == 2
    own = Rate()
    dllm.speculate(verifier, "prompt_lookup", PROMPT, max_new_tokens=24, controller=own)
    assert len(json.loads(file.read_text())["entries"]) == 2  # a controller of the caller's own
