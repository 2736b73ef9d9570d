"""Tuning: it saves what it says, and luck does not win."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import dllm
from dllm.eval.measure import Record, Setting
from dllm.eval.tune import Candidate, Tuning, holds, survivors, tune
from tests.cli.conftest import Run

CANVAS = {"max_new_tokens": 32}
BASE = Setting("llada", "llada", "none", CANVAS)


def candidate(name: str, right: list[bool], nfe: int) -> Candidate:
    n = len(right)
    record = Record("k", "m", "t", name, name, "none", {}, n, 0, 8, right, [8] * n, [nfe] * n,
                    [nfe * 9] * n, 0, nfe * 0.1, 1)  # fmt: skip
    return Candidate(Setting(name, name), [record])


def shares(share: float, n: int = 60) -> list[bool]:
    return (np.arange(n) < round(share * n)).tolist()


def test_survivors_are_the_cheapest_that_may_be_right() -> None:
    base = candidate("base", shares(0.9), 32)
    kinds = {"slow": (0.9, 16), "fast": (0.9, 4), "doubtful": (0.85, 2), "wrong": (0.3, 1)}
    alive = [candidate(name, shares(share), nfe) for name, (share, nfe) in kinds.items()]
    left = survivors(alive, base, Tuning(["t"], by="nfe", eta=2))
    assert [who.setting.method for who in left] == ["fast", "slow"]
    left = survivors(alive[1:], base, Tuning(["t"], by="nfe", eta=2))
    assert [who.setting.method for who in left] == ["fast", "doubtful"]


def test_a_setting_holds_only_with_evidence() -> None:
    how = Tuning(["t"], by="nfe")
    base = candidate("base", shares(0.9, 200), 32)
    assert holds(candidate("same", shares(0.9, 200), 4), base, how)
    assert not holds(candidate("worse", shares(0.8, 200), 4), base, how)
    assert not holds(candidate("dearer", shares(0.9, 200), 40), base, how)
    few = candidate("base", shares(0.9, 8), 32)
    assert not holds(candidate("same", shares(0.9, 8), 4), few, how)


def test_nano_reverses_in_one_step() -> None:
    settings = [Setting("threshold", f"threshold(tau={tau})", "none", CANVAS)
                for tau in (0.99, 0.9, 0.5)]  # fmt: skip
    how = Tuning(["reverse"], by="nfe", rungs=(4,), confirm=20, tolerance=0.2)
    choice = tune(dllm.load("nano"), settings, BASE, how)
    assert choice.confirmed and choice.saving > 3
    assert choice.accuracy >= 0.99 * choice.baseline and choice.examples == 20


def test_where_nothing_is_good_enough_the_baseline_stays() -> None:
    """Four prompts prove nothing."""
    settings = [Setting("threshold", "threshold(tau=0.9)", "none", CANVAS)]
    how = Tuning(["reverse"], by="nfe", rungs=(2,), confirm=4)
    choice = tune(dllm.load("nano"), settings, BASE, how)
    assert not choice.confirmed and choice.setting == BASE and choice.saving == 1


def test_command_line_writes_a_preset_that_generate_takes(cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "preset.json"
    result = cli(
        "tune", "-t", "reverse", "-s", "threshold(tau={0.99,0.5})", "--by", "nfe", "-n", "20",
        "--rungs", "4", "--tolerance", "0.2", "--max-new-tokens", "32", "-o", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "less nfe than one token per step" in result.stdout
    preset = json.loads(file.read_text())
    assert preset["sampler"].startswith("threshold(tau=") and preset["found"]["confirmed"]
    prompt = "Reverse this list: Tom, Anna, Ben"
    out = json.loads(cli("generate", prompt, "--preset", str(file), "--json").stdout)
    assert (out["sampler"], out["text"]) == (preset["sampler"], "Ben, Anna, Tom")
    clash = cli("generate", prompt, "--preset", str(file), "-s", "llada")
    assert clash.exit_code == 2 and "drop --preset" in clash.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tuning needs a task"),
        (["-t", "reverse", "--keep", "2"], "keep is a share"),
        (["-t", "reverse", "--by", "second"], "did you mean 'seconds'"),
        (["-t", "reverse", "--rungs", "a"], "--rungs takes numbers"),
        (["-t", "reverse", "-o", "/no/such/folder/p.json"], "cannot write"),
        (["-t", "revers", "-s", "threshold"], "did you mean 'reverse'"),
    ],
)
def test_bad_input(cli: Run, tiny_folder: Path, arguments: list[str], message: str) -> None:
    result = cli("tune", "-m", str(tiny_folder), *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not JSON"), ("{}", "lacks arguments, cache, sampler")]
)
def test_bad_presets(cli: Run, tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "preset.json"
    file.write_text(content)
    result = cli("generate", "x", "--preset", str(file))
    assert result.exit_code == 2 and message in result.stderr
    assert "cannot read the preset" in cli("generate", "x", "--preset", "/no/file").stderr
