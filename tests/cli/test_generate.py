"""``dllm generate``: prompts in, answers on stdout, the rest on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dllm
from dllm.cli.generate_options import Answers
from dllm.cli.inputs import read_prompts

from ..thin import some
from .conftest import Run

PROMPT = "Reverse this list: Tom, Anna"


def expected(model: dllm.DiffusionModel, prompt: str = PROMPT, **arguments: Any) -> str:
    arguments = {"max_new_tokens": 24, "block_length": 8} | arguments
    text: str = dllm.generate(model, prompt, **arguments).text
    return text


def test_the_answer_alone_is_on_stdout(ask: Run, tiny: dllm.DiffusionModel) -> None:
    result = ask("generate", PROMPT)
    assert result.exit_code == 0
    assert result.stdout == expected(tiny) + "\n"
    assert len(result.stderr.splitlines()) == 1
    assert "tokens per forward" in result.stderr


@pytest.mark.parametrize("source", ["stdin", "dash", "file", "file dash"])
def test_other_sources_of_a_prompt(
    ask: Run, tiny: dllm.DiffusionModel, tmp_path: Path, source: str
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n", encoding="utf-8")
    arguments = {"stdin": [], "dash": ["-"], "file": ["-f", str(file)], "file dash": ["-f", "-"]}
    result = ask("generate", "--raw", *arguments[source], stdin=PROMPT + "\n")
    assert result.stdout == expected(tiny, chat=False) + "\n"


def test_lines_are_prompts_of_one_batch(ask: Run, tiny: dllm.DiffusionModel) -> None:
    result = ask("generate", "--lines", "--json", stdin=f"{PROMPT}\n\nSort: Ben, Adam\n")
    entries = {entry["index"]: entry for entry in map(json.loads, result.stdout.splitlines())}
    assert sorted(entries) == [0, 2]  # the blank line keeps its place
    assert entries[0]["prompt"] == PROMPT and entries[0]["text"] == expected(tiny)
    assert entries[2]["text"] == expected(tiny, "Sort: Ben, Adam")


LINES = ["Tom", "", "Ben, Adam, Mia", "Tom", "Zoe"]


def test_texts_come_in_the_order_of_the_lines(ask: Run, tiny: dllm.DiffusionModel) -> None:
    result = ask("generate", "--lines", "--max-batch-size", "2", stdin="\n".join(LINES))
    answers = dllm.generate(
        tiny, [line for line in LINES if line], max_new_tokens=24, block_length=8
    )
    texts = [answer.text for answer in answers]
    assert result.stdout == "\n".join([texts[0], "", *texts[1:]]) + "\n"
    assert result.stderr.count("tokens per forward") == 4


def test_several_answers_per_prompt(ask: Run, tiny: dllm.DiffusionModel) -> None:
    result = ask("generate", "--lines", "--json", "-n", "2", "--temperature", "1", stdin="Tom\nTom")
    entries = [json.loads(line) for line in result.stdout.splitlines()]
    texts = {(entry["index"], entry["sample"]): entry["text"] for entry in entries}
    how: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8, "temperature": 1.0}
    expected = dllm.generate(tiny, ["Tom", "Tom"], n=2, **how)
    assert texts == {
        (i, j): one.text for i, group in enumerate(expected) for j, one in enumerate(group)
    }
    assert len(set(texts.values())) > 1


def interrupted(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Ctrl-C when so many answers are there."""
    real = dllm.api.as_completed

    def stopped(*args: Any, **rest: Any) -> Any:
        for count, item in enumerate(real(*args, **rest)):
            if count == after:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(dllm.api, "as_completed", stopped)


def test_what_is_done_is_kept_and_the_rest_follows(
    ask: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in mid-line as well; the same answers come as without an interruption."""
    file, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    arguments = ["generate", "--lines", "--temperature", "1", "--max-batch-size", "2", "--output"]
    ask(*arguments, str(whole), stdin="\n".join(LINES))
    with monkeypatch.context() as patch:
        interrupted(patch, 2)
        result = ask(*arguments, str(file), stdin="\n".join(LINES))
    assert result.exit_code == 130 and "stopped: 2 of 4 answered; --resume goes on" in result.stderr
    assert len(file.read_text().splitlines()) == 2
    with file.open("a") as more:
        more.write('{"index": 4, "prom')
    refused = ask(*arguments, str(file), stdin="\n".join(LINES))
    assert refused.exit_code == 2 and "go on with it by --resume" in refused.stderr
    result = ask(*arguments, str(file), "--resume", stdin="\n".join(LINES))
    assert result.exit_code == 0 and "2 answered, 2 were there" in result.stderr

    def texts(path: Path) -> dict[int, str]:
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(entries) == 4
        return {entry["index"]: entry["text"] for entry in entries}

    assert texts(file) == texts(whole) and result.stdout == ""
    again = ask(*arguments, str(file), "--resume", stdin="\n".join(LINES))
    assert "0 answered, 4 were there" in again.stderr


@pytest.mark.parametrize(
    ("more", "lines", "message"),
    some(
        [
            (["--resume"], LINES[::-1], "answers another prompt"),
            (["--resume", "-s", "llada"], LINES, "made with sampler 'threshold', not 'llada'"),
            (["--resume", "--seed", "5"], LINES, "made with seed 0, not 5"),
            (["--resume", "--temperature", "1"], LINES, "made with arguments"),
            (["--resume", "--raw"], LINES, "made with arguments"),
        ],
        3,
    ),
)
def test_answers_of_other_runs_are_not_mixed(
    ask: Run, tmp_path: Path, more: list[str], lines: list[str], message: str
) -> None:
    file = tmp_path / "out.jsonl"
    ask("generate", "--lines", "-o", str(file), stdin="\n".join(LINES))
    result = ask("generate", "--lines", "-o", str(file), *more, stdin="\n".join(lines))
    assert result.exit_code == 2 and message in result.stderr


def test_resume_needs_a_file(ask: Run) -> None:
    result = ask("generate", PROMPT, "--resume")
    assert result.exit_code == 2 and "name it with --output" in result.stderr


def test_json_has_the_figures_and_the_versions(ask: Run, tiny: dllm.DiffusionModel) -> None:
    result = ask("generate", PROMPT, "--json", "--seed", "7", "--cache", "dual")
    outcome = json.loads(result.stdout)
    assert result.stderr == ""
    assert outcome["text"] == expected(tiny, seed=7, cache="dual")
    assert len(outcome["tokens"]) / outcome["nfe"] == pytest.approx(outcome["tokens_per_forward"])
    assert (outcome["sampler"], outcome["cache"], outcome["seed"]) == ("threshold", "dual", 7)
    assert outcome["computed"] > 0 and outcome["seconds"] > 0 and outcome["peak_memory"] > 0
    assert outcome["finish_reason"] in ("stop", "length")
    assert outcome["versions"]["dllm"] == dllm.__version__
    assert all(outcome["versions"][name] for name in ("python", "torch", "transformers", "numpy"))


def test_options_reach_the_decoder(ask: Run, tiny: dllm.DiffusionModel) -> None:
    result = ask(
        "generate", PROMPT, "--raw", "-s", "llada", "--steps", "6", "--temperature", "1",
        "--top-k", "9", "--top-p", "0.9", "--seed", "3", "--min-new-tokens", "4",
        "--eos-policy", "none", "--cfg-scale", "0.5", "--max-batch-tokens", "64",
    )  # fmt: skip
    assert result.stdout == expected(
        tiny, chat=False, sampler="llada", steps=6, temperature=1.0, top_k=9, top_p=0.9, seed=3,
        min_new_tokens=4, eos_policy="none", cfg_scale=0.5, max_batch_tokens=64,
    ) + "\n"  # fmt: skip


def test_stop_strings_end_the_answer(ask: Run, tiny: dllm.DiffusionModel) -> None:
    whole = expected(tiny)
    stops = [whole[8:10], whole[4:6]]
    result = ask("generate", PROMPT, "--stop", stops[0], "--stop", stops[1])
    assert result.stdout == whole[: min(whole.index(stop) for stop in stops)] + "\n"


def test_every_generation_argument_has_an_option() -> None:
    only_for_parity = {"suppress_mask"}  # with official code, from Python
    assert dllm.GenerationConfig.fields().keys() - only_for_parity == Answers.PARAMETERS


def test_the_trace_is_written(ask: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    result = ask("generate", PROMPT, "--json", "--trace", str(file), "--top-candidates", "3")
    trace = json.loads(file.read_text(encoding="utf-8"))
    assert len(trace["steps"]) == json.loads(result.stdout)["nfe"]
    assert len(trace["steps"][0]["candidates"][0][1]) == 3


def test_every_line_has_its_trace(ask: Run, tmp_path: Path) -> None:
    ask("generate", "--lines", "--trace", str(tmp_path / "t.json"), stdin="Tom\nBen\n")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["t-0.json", "t-1.json"]


def test_lines_end_at_line_feeds_only() -> None:
    assert read_prompts("a\u2028b\n\nc", None, True) == ["a\u2028b", "", "c"]
