"""Sweeps: what they measure, how they resume, what they say about it."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dllm
from dllm.cli.app import Terminated
from dllm.eval import report
from dllm.eval.curves import (
    SWEPT,
    WITHOUT,
    curve,
    method_of,
    samplers_with_curves,
    settings,
    spread,
)
from dllm.eval.measure import Cell, Record, Setting, fingerprint
from dllm.eval.problems import find_task, read_file
from dllm.eval.sweep import PRESETS, Journal, Sweep, distinct, preset, run
from dllm.samplers import Window, available, compose, register
from tests.cli.conftest import Run

from .test_report import fake

CANVAS = (("block_length", 8), ("max_new_tokens", 16))


def sweep(**changes: object) -> Sweep:
    how: dict[str, object] = {"tasks": ["copy", "sort"], "samplers": ["threshold(tau={0.9,0.5})"],
           "caches": ["none", "dual"], "examples": 4, "arguments": CANVAS}  # fmt: skip
    return Sweep(**(how | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def records(tiny: dllm.DiffusionModel, tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    return run(tiny, sweep().cells(), Journal(tmp_path_factory.mktemp("s") / "results.jsonl"))


def test_every_combination_is_measured_once(records: list[Record]) -> None:
    seen = {(r.task, r.sampler, r.cache) for r in records}
    assert len(records) == len(seen) == 8
    for record in records:
        assert len(record.right) == len(record.tokens) == len(record.nfe) == 4
        assert record.seconds > 0 and record.mean("computed") > record.mean("tokens")
    dual = [r for r in records if r.cache == "dual" and "0.9" in r.sampler]
    none = [r for r in records if r.cache == "none" and "0.9" in r.sampler]
    assert sum(sum(r.computed) for r in dual) < sum(sum(r.computed) for r in none)


def test_figures_are_those_of_generate(tiny: dllm.DiffusionModel, records: list[Record]) -> None:
    record = next(r for r in records if (r.task, r.cache) == ("sort", "none"))
    examples = find_task("sort").examples(4)
    outs = dllm.generate(tiny, [e.prompt for e in examples], sampler=record.sampler, **dict(CANVAS))
    assert list(record.tokens) == [len(out.tokens) for out in outs]
    assert list(record.nfe) == [out.nfe for out in outs]
    assert record.point[0] == sum(record.tokens) / sum(record.nfe)


def test_an_interrupted_sweep_goes_on(tiny: dllm.DiffusionModel, tmp_path: Path) -> None:
    cells, file = sweep(caches=["none"]).cells(), tmp_path / "results.jsonl"

    class StopError(Exception):
        pass

    def stop(done: int, total: int, cell: Cell, record: Record | None) -> None:
        if done == 2 and record is None:
            raise StopError

    with pytest.raises(StopError):
        run(tiny, cells, Journal(file), stop)
    text = file.read_text()
    assert text.count("\n") == 2
    file.write_text(text + text.splitlines()[0][:100])  # cut in the middle of a line
    measured: list[int] = []
    result = run(
        tiny, cells, Journal(file), lambda d, t, c, r: measured.append(d) if r is None else None
    )
    assert measured == [2, 3]
    assert len(result) == 4 and len(file.read_text().splitlines()) == 4
    again = run(tiny, cells, Journal(file), lambda d, t, c, r: pytest.fail() if r is None else None)
    assert [r.key for r in again] == [c.key(fingerprint(tiny)) for c in cells]
    entry = json.loads(file.read_text().splitlines()[0])
    assert entry["machine"]["torch"] and entry["dtype"] == "float32"
    assert entry["arguments"] == dict(CANVAS)


def test_other_weights_are_another_measurement(tiny: dllm.DiffusionModel) -> None:
    assert fingerprint(tiny) == fingerprint(tiny) != fingerprint(dllm.load("nano"))
    other = replace(tiny, tokenizer=copy.deepcopy(tiny.tokenizer))
    assert fingerprint(tiny) == fingerprint(other)
    assert fingerprint(tiny) != fingerprint(replace(tiny, generation_defaults={"steps": 3}))
    other.tokenizer.chat_template = "{{ messages[0].content }}"
    assert fingerprint(tiny) != fingerprint(other)
    cell = Cell("copy", Setting("threshold", "threshold"), 4)
    assert cell.key("a") != cell.key("b")
    assert cell.key("a") != Cell("copy", Setting("threshold", "threshold"), 5).key("a")


def test_other_questions_under_one_name_are_measured_again(
    tiny: dllm.DiffusionModel, tmp_path: Path
) -> None:
    file, journal = tmp_path / "mine.jsonl", tmp_path / "results.jsonl"
    cells = [Cell(str(file), Setting("t", "threshold", "none", dict(CANVAS)), 1)]
    for answer, lines in (("b", 1), ("b", 1), ("c", 2)):
        file.write_text(json.dumps({"prompt": "Copy this list: Tom", "answer": answer}) + "\n")
        run(tiny, cells, Journal(journal))
        assert len(journal.read_text().splitlines()) == lines


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text('{"key": 1}\n{"key": 2}\n')
    with pytest.raises(dllm.ConfigError, match=r"line 1 of .*results\.jsonl"):
        Journal(file)


def test_every_sampler_has_a_curve() -> None:
    """None is forgotten: a registered part has a curve or a reason to have none."""
    names = {info.name for info in available() if info.role != "length"}
    assert set(samplers_with_curves()) | set(WITHOUT) == names
    assert not set(samplers_with_curves()) & set(WITHOUT) and set(SWEPT) <= names
    for name in samplers_with_curves():
        specs = curve(name, 32)
        assert len(specs) == len(set(specs)) > 1, name
        assert name in {part.name for part in compose(specs[0]).parts}, name
        for spec in specs:
            compose(spec)
    assert curve("llada", 32)[:2] == ["llada(steps=32)", "llada(steps=16)"]


def test_a_spec_is_on_the_curve_of_its_name_if_it_sets_one_argument() -> None:
    curves = {
        "threshold": "threshold",
        "threshold(tau=0.9)": "threshold",
        "threshold(0.9)": "threshold",
        "adablock+threshold(tau=0.9)": "adablock+threshold",
        "threshold(tau=0.9)+credit": "threshold+credit",
        "threshold(tau=0.9)+prophet": "threshold+prophet",
        "llada(steps=32)+adablock": "llada+adablock",
        "lopa(threshold(tau=0.9))": "lopa(threshold)",
        "lopa(localleap)": "lopa(localleap)",
        "lopa(threshold, k=4)": "lopa(threshold, k={})",
        "lopa(localleap, k=4)": "lopa(localleap, k={})",
        "llada(steps=8,remasking=random)": "llada(steps=8,remasking=random)",
    }
    assert {spec: method_of(spec) for spec in curves} == curves
    several = {
        "threshold(tau={0.9,0.5})": {"threshold"},
        "llada(steps={8, 4},remasking=random)": {"llada(steps={},remasking=random)"},
        "{eb,threshold}": {"eb", "threshold"},
        "lopa({eb,threshold}, k={2,4})": {"lopa(eb, k={})", "lopa(threshold, k={})"},
    }
    assert {spec: {method for method, _ in spread(spec)} for spec in several} == several
    result = settings(["llada(steps=32)"], ["llada"], ["none"], {"max_new_tokens": 32})
    assert [s.method for s in result] == ["llada"] * 5


def test_a_window_of_a_plugin_gets_a_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    from dllm.samplers.compose import SAMPLERS

    monkeypatch.setattr(SAMPLERS, "_entries", dict(SAMPLERS._entries))

    @register("toy")
    class Toy(Window):
        """A window of somebody else."""

    assert "toy" in samplers_with_curves()
    assert curve("toy", 32)[0].startswith("toy+threshold(tau=")


def test_braces_are_several_values() -> None:
    assert [one for _, one in spread("a(x={1, 2},y={3,4})")] == [
        "a(x=1,y=3)", "a(x=1,y=4)", "a(x=2,y=3)", "a(x=2,y=4)"
    ]  # fmt: skip
    assert list(spread("a")) == [("a", "a")]
    result = settings(["threshold(tau=0.9)"], ["threshold"], ["none"], {"max_new_tokens": 32})
    assert len(result) == len({s.sampler for s in result})


def test_samplers_get_the_options_they_take() -> None:
    arguments = {"max_new_tokens": 32, "block_length": 8}
    result = {s.sampler: s.arguments for s in settings(["dream", "llada"], [], ["none"], arguments)}
    assert result == {"dream": {"max_new_tokens": 32}, "llada": arguments}


def test_presets_cover_everything() -> None:
    readme = preset("readme")
    cells = distinct(cell for one in readme for cell in one.cells())
    assert {cell.setting.method for cell in readme[0].cells()} == set(samplers_with_curves())
    assert {cell.setting.cache for cell in cells} == {c.name for c in dllm.cache.available()}
    assert len(cells) < sum(len(one.cells()) for one in readme)  # settings that two sweeps share
    assert set(PRESETS) == {"readme", "quick"}


@pytest.mark.slow
def test_the_readme_has_every_cache_that_nano_can_run(
    tiny: dllm.DiffusionModel, tmp_path: Path
) -> None:
    less: dict[str, Any] = {"tasks": ["copy"], "examples": 1,
                            "arguments": (("block_length", 4), ("max_new_tokens", 4))}  # fmt: skip
    sweeps = [replace(one, samplers=one.samplers[-1:], **less) for one in preset("readme")[1:]]
    refused: dict[str, str] = {}
    result = run(
        tiny, distinct(c for one in sweeps for c in one.cells()),
        Journal(tmp_path / "r.jsonl"), refused=refused,
    )  # fmt: skip
    names = {cache.name for cache in dllm.cache.available()}
    assert names - {record.cache for record in result} == {"block", "wedlm"}  # for other networks
    assert "block-causal" in refused["threshold(tau=0.9) · block"]


def test_what_cannot_work_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from dllm.core.capabilities import WHOLE_TEXT
    from dllm.samplers.threshold import Threshold

    monkeypatch.setattr(Threshold, "needs", Threshold.needs | {WHOLE_TEXT})
    result = sweep(samplers=["threshold"])
    assert {cell.setting.cache for cell in result.cells()} == {"none"}
    assert "threshold needs" in result.refused()["threshold · dual"]


def test_a_setting_without_its_parts_is_left_out(
    tiny: dllm.DiffusionModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dllm.samplers.factor import Factor

    def missing(self: Factor, view: Any) -> Any:
        raise dllm.ConfigError("cannot read the filter")

    monkeypatch.setattr(Factor, "select", missing)
    cells = sweep(samplers=["factor", "threshold"], caches=["none"])
    refused: dict[str, str] = {}
    result = run(tiny, cells.cells(), Journal(tmp_path / "r.jsonl"), refused=refused)
    assert {r.sampler for r in result} == {"threshold"}
    assert "cannot read the filter" in next(iter(refused.values()))
    with pytest.raises(dllm.ConfigError, match="cannot read the filter"):
        run(tiny, cells.cells(), Journal(tmp_path / "r2.jsonl"))


def test_tables(records: list[Record]) -> None:
    full = report.full_table(records)
    assert full.count("\n") == 2 + 8 - 1 and "`threshold(tau=0.5)`" in full
    caches = report.cache_table(records)
    assert caches.count("`dual`") == 2
    ratio = float(caches.splitlines()[2].split("|")[5].strip(" ×"))
    base = [r for r in records if r.sampler == "threshold(tau=0.9)"]
    none = sum(r.mean("computed") for r in base if r.cache == "none")
    assert ratio == pytest.approx(none / sum(r.mean("computed") for r in base if r.cache != "none"),
                                  abs=0.01)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_plots(records: list[Record], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from dllm.eval.plot import multiples, pareto

    files = [tmp_path / "p.svg", tmp_path / "p.png"]
    pareto(records, files)
    svg = files[0].read_text()
    for text in ("tokens per forward", "positions computed", "seconds per prompt", "copy", "sort"):
        assert text in svg
    assert files[1].read_bytes()[:4] == b"\x89PNG"
    first = files[0].read_bytes()
    pareto(records, files[:1])
    assert files[0].read_bytes() == first
    multiples(records, files[:1])
    assert "tokens per forward" in files[0].read_text() and ">threshold<" in files[0].read_text()
    for draw in (pareto, multiples):
        with pytest.raises(dllm.ConfigError, match="nothing to plot"):
            draw([], files)


@pytest.mark.slow
def test_a_sweep_of_several_machines_says_so(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    command = ("bench", "-m", str(tiny_folder), "-s", "threshold", "-n", "1", "--no-plot",
               "--max-new-tokens", "16", "-o", str(tmp_path))  # fmt: skip
    assert "mixes machines" not in cli(*command, "-t", "copy").stderr
    file = tmp_path / "results.jsonl"
    entry = json.loads(file.read_text())
    entry["machine"] |= {"threads": 64, "load": 99.0}
    file.write_text(json.dumps(entry) + "\n")
    mixed = cli(*command, "-t", "copy,sort").stderr
    line = next(line for line in mixed.splitlines() if "mixes machines" in line)
    assert line.endswith("mixes machines: threads 64 and 1")


def test_a_line_ends_at_line_feeds_only(tmp_path: Path) -> None:
    """JSON may hold other breaks as they are, such as U+2028."""
    file = tmp_path / "mine.jsonl"
    line = json.dumps({"prompt": "a\u2028b\x85c", "answer": "x"}, ensure_ascii=False)
    file.write_text(f"{line}\r\n{line}\n", encoding="utf-8")
    assert [question.prompt for question in read_file(file).questions] == ["a\u2028b\x85c"] * 2
    journal, made = Journal(tmp_path / "results.jsonl"), fake("a\u2028", "slow", 1, 2, 3)
    journal.add(made, {})
    assert list(Journal(journal.path).records) == [made.key]


def test_files_of_questions(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d", "match": "contains"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = read_file(file)
    first, second = task.examples(2)
    assert task.check(first, " b\n") and not task.check(first, "b c")
    assert task.check(second, "x d y") and task.examples(2, seed=3) == task.examples(2, seed=3)
    with pytest.raises(dllm.ConfigError, match="holds 2 questions"):
        task.examples(3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n', "line 1 of .* lacks answer"),
        ('{"prompt": "a", "answer": null}\n', "line 1 of .* lacks answer"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt"', "line 2 of .* is not JSON"),
        ("", "holds no questions"),
        ('{"prompt": "a", "answer": "b", "match": "equal"}', "did you mean 'equals'"),
        ('{"prompt": 5, "answer": "b"}', "line 1 of .*: a prompt is a string.*, not 5"),
        ('{"prompt": null, "answer": "b"}', "line 1 of .*, not None"),
        ('{"prompt": "\\ud800", "answer": "b"}', "line 1 of .* not valid Unicode"),
        ('{"prompt": [{"content": "a"}], "answer": "b"}', "line 1 of .* chat messages look like"),
        ("[" * 100_000, "line 1 of .* is not JSON"),
    ],
)
def test_bad_files(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(content)
    with pytest.raises(dllm.DllmError, match=message):
        read_file(file)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_command_line(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ("bench", "-m", str(tiny_folder), "-t", "copy", "-s", "threshold(tau={0.9,0.5})",
               "-n", "3", "--max-new-tokens", "16", "--output", str(tmp_path / "out"))  # fmt: skip
    result = cli(*command)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("`threshold(tau=") == 2 and "2 records" in result.stderr
    names = {"results.jsonl", "table.md", "caches.md", "fastest.md"}
    names |= {f"{name}.{kind}" for name in ("pareto", "methods") for kind in ("svg", "png")}
    assert {file.name for file in (tmp_path / "out").iterdir()} == names


def test_missing_plots_are_told_before_measuring(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dllm.eval.plot.find_spec", lambda name: None)
    result = cli("bench", "--preset", "quick", "--plot", "-o", str(tmp_path / "out"))
    assert result.exit_code == 2 and "--no-plot" in result.stderr
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_a_sweep_ends_with_its_tables(
    cli: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dllm.eval.plot.find_spec", lambda name: None)
    out = tmp_path / "out"
    command = ("bench", "-m", str(tiny_folder), "-s", "threshold", "-t", "copy", "-n", "1",
               "--max-new-tokens", "8", "-o", str(out))  # fmt: skip
    result = cli(*command)
    assert result.exit_code == 0 and "threshold" in result.stdout
    assert "matplotlib is missing" in result.stderr
    assert (out / "table.md").exists() and not list(out.glob("*.svg"))


def test_an_unknown_task_is_told_before_anything_else(
    cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object, **__: object) -> None:
        pytest.fail("the model was loaded")

    monkeypatch.setattr("dllm.eval.plot.find_spec", lambda name: None)
    monkeypatch.setattr("dllm.models.load", load)
    result = cli("bench", "-t", "copy,sorted")
    assert result.exit_code == 2 and "did you mean 'sort'" in result.stderr


def test_tasks_by_commas_or_repeated(cli: Run, tmp_path: Path) -> None:
    command = ("bench", "-s", "threshold", "-n", "1", "--max-new-tokens", "16", "--no-plot")
    result = cli(*command, "-t", "copy, reverse", "--task", "copy", "-o", str(tmp_path / "out"))
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("| copy |") == result.stdout.count("| reverse |") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no task: name one"),
        (["-t", "copy", "-s", "treshold"], "did you mean 'threshold'"),
        (["-t", "copy", "-c", "duall"], "did you mean 'dual'"),
        (["--preset", "read"], "did you mean 'readme'"),
        (["--preset", "quick", "-s", "llada"], "drop --preset"),
        (["-t", "story2", "-n", "8", "--max-new-tokens", "120"], "more than the context of 128"),
        (["-t", "/no/such.jsonl"], "cannot read the questions"),
    ],
)
def test_bad_input(
    cli: Run, tiny_folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    how = ("--no-plot", "-o", str(tmp_path / "out"))
    result = cli("bench", "-m", str(tiny_folder), *arguments, *how)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(("stop", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_stopped_bench_says_that_it_goes_on(
    cli: Run, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    stop: type[BaseException], code: int,
) -> None:  # fmt: skip
    """Ctrl-C or SIGTERM in the second cell: the first is kept, and is not measured again."""
    asked: list[str] = []
    real = dllm.eval.sweep.measure

    def measure(model: Any, task: Any, cell: Any, *rest: Any) -> Any:
        asked.append(cell.setting.sampler)
        if len(asked) == 2:
            raise stop
        return real(model, task, cell, *rest)

    monkeypatch.setattr("dllm.eval.sweep.measure", measure)
    arguments = ["bench", "-m", str(tiny_folder), "-t", "copy", "-s", "threshold(tau={0.9,0.5})",
                 "-n", "2", "--max-new-tokens", "8", "--no-plot", "-o", str(tmp_path)]  # fmt: skip
    result = cli(*arguments)
    assert result.exit_code == code
    assert "stopped with 1 cell left: the same command goes on" in result.stderr
    assert cli(*arguments).exit_code == 0
    assert asked == [f"threshold(tau={tau})" for tau in (0.9, 0.5, 0.5)]
