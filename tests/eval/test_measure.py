"""The rules of measurement: what counts, what does not, and that all methods see the same."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dllm
from dllm.eval.measure import Cell, Record, Setting, measure
from dllm.eval.metrics import wilson
from dllm.eval.problems import draw, find_task
from dllm.eval.report import percent
from dllm.eval.sweep import Journal, run

CANVAS = {"max_new_tokens": 8, "block_length": 8}


def cell(sampler: str = "threshold", examples: int = 8, **how: Any) -> Cell:
    return Cell("sort", Setting(sampler, sampler, "none", CANVAS), examples, **how)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was asked for; the first call costs 100 s, others 1 s, by the clock of the measurement;
    memory grows."""
    asked: list[list[str]] = []

    now = [0.0]
    monkeypatch.setattr("dllm.eval.measure.time.perf_counter", lambda: now[0])

    def generate(_: object, prompts: list[str], **__: Any) -> list[SimpleNamespace]:
        asked.append(list(prompts))
        first = len(asked) == 1
        now[0] += 100.0 if first else 1.0
        figures = {"tokens": [1] * 5, "nfe": 3, "computed": 40, "forced": 1, "text": "x",
                   "peak_memory": 1000 if first else len(asked)}  # fmt: skip
        return [SimpleNamespace(**figures) for _ in prompts]

    def as_completed(*given: Any, **how: Any) -> Any:
        return reversed(list(enumerate(generate(*given, **how))))

    monkeypatch.setattr("dllm.eval.measure.generate", generate)
    monkeypatch.setattr("dllm.eval.measure.as_completed", as_completed)
    return asked


def test_tokens_end_with_the_first_stop_and_leave_out_the_prompt(nano: dllm.DiffusionModel) -> None:
    """Counted once more from the whole canvases: some answers end, some fill their canvas."""
    result = measure(nano, find_task("sort"), cell("llada(steps=8)", 8), "nano")
    prompts = [example.prompt for example in find_task("sort").examples(8)]
    outs = dllm.generate(nano, prompts, sampler="llada(steps=8)", **CANVAS)
    expected = []
    for out in outs:
        written = out.sequences[out.prompt_length :]
        stops = np.flatnonzero(np.isin(written, nano.facts.stop_token_ids))
        expected.append(int(stops[0]) + 1 if stops.size else len(written))
    assert list(result.tokens) == expected
    assert {out.finish_reason for out in outs} == {"stop", "length"}
    assert min(expected) < 8 == max(expected)


def test_the_warm_up_is_not_counted_and_figures_are_kept_apart(
    tiny: dllm.DiffusionModel, calls: list[list[str]]
) -> None:
    counts: list[int] = []
    result = measure(tiny, find_task("sort"), cell(rows=3), "tiny", counts.append)
    assert [len(prompts) for prompts in calls] == [1, 8] and counts == [*range(1, 9)]
    assert result.seconds == 1.0 and result.peak_memory == 2
    assert [result.mean(name) for name in ("tokens", "nfe", "computed", "seconds")] == [
        5, 3, 40, 1 / 8
    ]  # fmt: skip
    assert result.point[0] == 5 / 3 and result.forced == 8


def test_all_methods_see_the_same_prompts(
    tiny: dllm.DiffusionModel, calls: list[list[str]]
) -> None:
    seen = []
    for sampler, seed in (("threshold", 0), ("eb", 0), ("eb", 1)):
        calls.clear()
        measure(tiny, find_task("sort"), cell(sampler, seed=seed), "tiny")
        seen.append(calls[1:])
    assert seen[0] == seen[1] != seen[2]


def test_a_line_says_how_it_came_about(tiny: dllm.DiffusionModel, tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    run(tiny, [cell(examples=2, seed=7)], Journal(file))
    entry = json.loads(file.read_text())
    assert (entry["seed"], entry["examples"], entry["rows"]) == (7, 2, 32)
    assert entry["arguments"] == CANVAS and entry["sampler"] == "threshold"
    assert (entry["dtype"], entry["device"]) == ("float32", "cpu")
    for name in ("cpu", "cores", "threads", "load", "python", "dllm", "torch", "transformers"):
        assert entry["machine"][name] is not None, name
    assert len(entry["right"]) == len(entry["tokens"]) == len(entry["nfe"]) == 2


def test_shares_have_wilson_intervals() -> None:
    right = [True] * 9 + [False]
    result = Record("k", "m", "t", "a", "a", "none", {}, 10, 0, 8, right, [1] * 10, [1] * 10,
                   [1] * 10, 0, 1.0, 1)  # fmt: skip
    assert result.interval == wilson(9, 10) and percent(result) == "90.0 (60–98)"


def test_a_task_says_how_many_prompts_it_has() -> None:
    fact = find_task("fact")
    assert len({example.prompt for example in draw(fact, 113)}) == 113
    with pytest.raises(dllm.ConfigError, match="only 113 different prompts, not 20000: ask"):
        draw(fact, 20_000)
    with pytest.raises(dllm.ConfigError, match="at most 100000 examples, not 99999999: ask"):
        draw(find_task("sort"), 99_999_999)


def test_what_does_not_fit_the_context_is_refused() -> None:
    large = Cell("sort", Setting("t", "threshold", "none", {"max_new_tokens": 2040}), 2)
    with pytest.raises(dllm.ConfigError, match="choose another task"):
        measure(dllm.load("nano"), find_task("sort"), large, "nano")
