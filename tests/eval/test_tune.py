"""Tuning: it saves what it says, and luck does not win."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

import dllm
from dllm.eval.measure import Cell, Record, RefusedError, Setting
from dllm.eval.metrics import paired
from dllm.eval.problems import FileTask, draw, problems
from dllm.eval.tune import Candidate, Choice, Tuning, holds, needed, survivors, tune
from tests.cli.conftest import Run

CANVAS = {"max_new_tokens": 32}
BASE = Setting("llada", "llada", "none", CANVAS)


def candidate(name: str, right: list[bool], nfe: float) -> Candidate:
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
    left = survivors(alive, base, Tuning(["t"], by="nfe", finalists=2))
    assert [who.setting.method for who in left] == ["fast", "slow"]
    left = survivors(alive[1:], base, Tuning(["t"], by="nfe", finalists=2))
    assert [who.setting.method for who in left] == ["fast", "doubtful"]


def test_a_setting_holds_only_with_evidence() -> None:
    how, base = Tuning(["t"]), shares(0.9, 200)
    assert holds(paired(base, base), 0.9, how)
    assert not holds(paired(shares(0.8, 200), base), 0.9, how)
    assert not holds(paired(shares(0.9, 8), shares(0.9, 8)), 0.9, how)


def test_what_saves_nothing_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    world({"base": (0.9, 32.0), "dearer": (0.9, 33.0)}, 0, monkeypatch)
    assert not simulated({"base": (0.9, 32.0), "dearer": (0.9, 33.0)}).confirmed


def world(
    truth: dict[str, tuple[float, float]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings of known accuracy and cost.  On each prompt one setting may do what the baseline
    does not, and the other way round, 1 % of the time beyond what their accuracies imply."""
    least = truth["base"][0]
    solved = np.random.default_rng([seed, 0]).random(1000) < least
    answers = {"base": solved}
    for number, (name, (accuracy, _)) in enumerate(truth.items()):
        if name != "base":
            lost = max(0.0, least - accuracy) + 0.01
            won, luck = lost - (least - accuracy), np.random.default_rng([seed, 1, number])
            chance = luck.random(1000)
            answers[name] = np.where(solved, chance >= lost / least, chance < won / (1 - least))

    def measure(_: object, __: object, cell: Cell, ___: str) -> Record:
        name, span = cell.setting.sampler, slice(cell.start, cell.start + cell.examples)
        return candidate(name, answers[name][span].tolist(), truth[name][1]).records[0]

    monkeypatch.setattr("dllm.eval.tune.measure", measure)
    monkeypatch.setattr("dllm.eval.tune.fingerprint", lambda model: "")
    monkeypatch.setattr("dllm.eval.tune.refusal", lambda setting: None)


def simulated(truth: dict[str, tuple[float, float]]) -> Choice:
    result = [Setting(name, name) for name in truth if name != "base"]
    model: dllm.DiffusionModel = None  # type: ignore[assignment]  # nothing is decoded
    return tune(model, result, Setting("base", "base"), Tuning(["copy"], by="nfe"))


def test_noise_does_not_win_and_the_best_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty settings that are faster and worse, fifteen that lose nothing."""
    savings = []
    for seed in range(4):
        rng = np.random.default_rng([5, seed])
        truth = {"base": (0.9, 32.0)}
        truth |= {f"bad{i}": (0.9 - rng.uniform(0.08, 0.4), rng.uniform(1, 8)) for i in range(60)}
        truth |= {f"good{i}": (0.9, rng.uniform(4, 30)) for i in range(15)}
        world(truth, seed, monkeypatch)
        choice = simulated(truth)
        assert not choice.setting.sampler.startswith("bad"), seed
        best = 32 / min(cost for name, (_, cost) in truth.items() if name.startswith("good"))
        savings.append(choice.saving / best)
    assert np.mean(np.array(savings) > 0.5) >= 0.9 and np.median(savings) > 0.8


def test_what_is_worse_by_the_tolerance_is_hardly_ever_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the border the five finalists together pass in at most 5 % of searches."""
    passed = 0
    for seed in range(6):
        truth = {"base": (0.9, 32.0)} | {f"b{i}": (0.9 - 0.059, 4.0 + i / 9) for i in range(20)}
        world(truth, seed, monkeypatch)
        passed += simulated(truth).confirmed
    assert passed <= 1


def test_rounds_and_proof_have_different_prompts(
    tiny: dllm.DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a file, whose questions are few."""
    file, seen = tmp_path / "mine.jsonl", []
    lines = [
        json.dumps({"prompt": f"Copy this list: Tom, {i}", "answer": str(i)}) for i in range(9)
    ]
    file.write_text("\n".join(lines))

    def measure(_: object, task: FileTask, cell: Cell, ___: str) -> Record:
        asked = task.examples(cell.start + cell.examples, cell.seed)[cell.start :]
        seen.append((cell.setting.sampler, [question.answer for question in asked]))
        name = cell.setting.sampler
        return candidate(name, [True] * cell.examples, 8 if name == "a" else 32).records[0]

    monkeypatch.setattr("dllm.eval.tune.measure", measure)
    monkeypatch.setattr("dllm.eval.tune.refusal", lambda setting: None)
    how = Tuning([str(file)], screen=5, confirm=4, tolerance=0.9, by="nfe")
    assert tune(tiny, [Setting("a", "a")], Setting("llada", "llada"), how).confirmed
    for name in ("a", "llada"):
        asked = [answer for who, answers in seen if who == name for answer in answers]
        assert sorted(asked) == sorted(map(str, range(9)))
    with pytest.raises(dllm.ConfigError, match="holds 9 questions, not 10: ask for fewer"):
        tune(tiny, [Setting("a", "a")], Setting("llada", "llada"), replace(how, confirm=5))


def test_survivors_are_tried_with_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One saves positions, one costs accuracy, one the model cannot run."""
    costs = {"none": 8, "dual": 4, "dkv": 2}
    asked: list[tuple[str, int]] = []

    def measure(_: object, __: object, cell: Cell, ___: str) -> Record:
        name, cache = cell.setting.sampler, cell.setting.cache
        asked.append((cache, cell.start))
        if cache == "block":
            raise RefusedError("not this model")
        right = [cache != "dkv"] * cell.examples
        return candidate(name, right, 32 if name == "llada" else costs[cache]).records[0]

    monkeypatch.setattr("dllm.eval.tune.measure", measure)
    monkeypatch.setattr("dllm.eval.tune.fingerprint", lambda model: "")
    how = Tuning(["copy"], by="computed", caches=("dual", "dkv", "block"))
    model: dllm.DiffusionModel = None  # type: ignore[assignment]  # nothing is decoded
    choice = tune(model, [Setting("t", "threshold")], BASE, how)
    assert choice.confirmed and choice.setting.cache == "dual" and choice.saving == 8
    assert choice.setting.method == "t · dual"
    assert {start for cache, start in asked if cache == "block"} == {0}
    assert min(start for cache, start in asked if cache == "dual") == 0


@pytest.mark.parametrize(("noise", "confirmed"), [(0.5, True), (1.5, False)])
def test_one_lucky_timing_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, noise: float, confirmed: bool
) -> None:
    """Half the baseline's time, or as long as it every other time."""
    runs = Counter[str]()

    def measure(_: object, __: object, cell: Cell, ___: str) -> Record:
        name = cell.setting.sampler
        runs[name] += 1
        seconds = 1.0 if name == "llada" else 0.5 * (1 + noise * (runs[name] % 2))
        record = candidate(name, [True] * cell.examples, 8).records[0]
        return replace(record, seconds=seconds * cell.examples)

    monkeypatch.setattr("dllm.eval.tune.measure", measure)
    monkeypatch.setattr("dllm.eval.tune.fingerprint", lambda model: "")
    model: dllm.DiffusionModel = None  # type: ignore[assignment]  # nothing is decoded
    choice = tune(model, [Setting("t", "threshold")], BASE, Tuning(["copy"]))
    assert choice.confirmed == confirmed
    assert choice.saving == pytest.approx(1 / 0.75 if confirmed else 1)


@pytest.mark.parametrize("settings", [1, 3, 40])
@pytest.mark.parametrize(("tolerance", "keep"), [(0.2, 0.99), (0.05, 0.99), (0.02, 1.0)])
def test_as_many_prompts_as_it_takes(settings: int, tolerance: float, keep: float) -> None:
    """With one prompt less nothing could be confirmed; that many confirm what changes nothing."""
    how = Tuning(["t"], keep=keep, tolerance=tolerance)
    n, z = needed(how, settings), NormalDist().inv_cdf(1 - 0.05 / min(5, settings) / 2)
    equal = paired([True] * n, [True] * n, z)
    assert holds(equal, 1.0, how)
    assert not holds(paired([True] * (n - 1), [True] * (n - 1), z), 1.0, how)


def test_too_few_prompts_are_refused_before_anything_is_answered(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dllm.models.load", pytest.fail)
    result = cli("tune", "-t", "copy", "-n", "24", "--tolerance", "0.2", "--by", "nfe")
    assert result.exit_code == 2
    assert "24 prompts cannot confirm that 99 %" in result.stderr
    assert "take at least 25 per task (-n)" in result.stderr
    two = cli("tune", "-t", "copy,sort", "-n", "5", "--tolerance", "0.2", "-s", "threshold")
    assert "10 prompts" in two.stderr and "take at least" in two.stderr
    exact = cli("tune", "-t", "copy", "--keep", "1", "--tolerance", "0")
    assert "any number of prompts" in exact.stderr


@pytest.mark.parametrize("name", ["fact", "sort"])
def test_no_prompt_is_drawn_twice(name: str) -> None:
    task = problems(name)
    result = [example.prompt for example in draw(task, 90, 1)]
    assert len(set(result)) == 90
    assert result[40:] == [example.prompt for example in draw(task, 90, 1, 40)]
    assert result[:40] == [example.prompt for example in draw(task, 40, 1)]
    assert result[:5] == [example.prompt for example in task.examples(5, 1)]


def test_a_task_says_when_it_runs_out(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "p.json")
    result = cli("tune", "-t", "fact", "-s", "threshold", "-m", str(tiny_folder), "-o", out)
    assert result.exit_code == 2 and "different prompts, not 296: ask for fewer" in result.stderr


@pytest.mark.slow
def test_nano_reverses_in_one_step() -> None:
    settings = [Setting("threshold", f"threshold(tau={tau})", "none", CANVAS)
                for tau in (0.99, 0.9, 0.5)]  # fmt: skip
    how = Tuning(["reverse"], by="nfe", screen=4, confirm=20, tolerance=0.25)
    choice = tune(dllm.load("nano"), settings, BASE, how)
    assert choice.confirmed and choice.saving > 3
    assert choice.accuracy >= 0.99 * choice.baseline and choice.examples == 20


@pytest.mark.slow
def test_where_nothing_is_good_enough_the_baseline_stays() -> None:
    settings = [Setting("threshold", "threshold(tau=0.0)", "none", CANVAS)]
    how = Tuning(["remove_random"], by="nfe", screen=2, confirm=12, tolerance=0.3)
    choice = tune(dllm.load("nano"), settings, BASE, how)
    assert not choice.confirmed and choice.setting == BASE and choice.saving == 1


def test_command_line_writes_a_preset_that_generate_takes(cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "preset.json"
    result = cli(
        "tune", "-t", "reverse", "-s", "threshold(tau={0.99,0.5})", "--by", "nfe", "-n", "10",
        "--screen", "3", "--tolerance", "0.4", "--max-new-tokens", "16", "-o", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "less nfe than one token per step" in result.stdout and "p = 1," in result.stdout
    preset = json.loads(file.read_text())
    assert preset["sampler"].startswith("threshold(tau=") and preset["found"]["confirmed"]
    prompt = "Reverse this list: Tom, Anna, Ben"
    out = json.loads(cli("generate", prompt, "--preset", str(file), "--json").stdout)
    assert (out["sampler"], out["text"]) == (preset["sampler"], "Ben, Anna, Tom")
    for given in (("-s", "llada"), ("-s", "threshold"), ("-c", "none")):
        clash = cli("generate", prompt, "--preset", str(file), *given)
        assert clash.exit_code == 2 and "drop --preset" in clash.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no task to tune on"),
        (["-t", "reverse", "--keep", "2"], "keep is a share"),
        (["-t", "reverse", "--by", "second"], "did you mean 'seconds'"),
        (["-t", "reverse", "--screen", "0"], "greater than or equal to 1"),
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
