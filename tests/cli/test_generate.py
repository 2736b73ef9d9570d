"""``dllm generate``: prompts in, answers on stdout, the rest on stderr."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import dllm
from dllm.cli.generate import Answers
from dllm.cli.inputs import read_prompts
from dllm.cli.options import RENAMED

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
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert first["text"] == expected(tiny)
    assert second["text"] == expected(tiny, "Sort: Ben, Adam")


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
    offered = {RENAMED.get(field.name, field.name) for field in fields(Answers)}
    only_for_parity = {"suppress_mask"}  # with official code, from Python
    assert {field.name for field in fields(dllm.GenerationConfig)} - only_for_parity <= offered


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
    assert read_prompts("a\u2028b\n\nc\n", None, True) == ["a\u2028b", "c"]
