"""``dllm generate``: prompts in, answers on stdout, the rest on stderr."""

import json
from pathlib import Path
from typing import Any

import pytest

import dllm
from dllm.cli.options import Answers

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


@pytest.mark.parametrize("source", some(["stdin", "dash", "file", "file dash"], 2))
def test_other_sources_of_a_prompt(
    ask: Run, tiny: dllm.DiffusionModel, tmp_path: Path, source: str
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT + "\n", encoding="utf-8")
    arguments = {"stdin": [], "dash": ["-"], "file": ["-f", str(file)], "file dash": ["-f", "-"]}
    result = ask("generate", "--raw", *arguments[source], stdin=PROMPT + "\n")
    assert result.stdout == expected(tiny, chat=False) + "\n"


LINES = ["Tom", "Ben, Adam, Mia", "Tom", "a\u2028b", "Zoe"]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of prompts: strings and objects, a blank line among them."""
    file = tmp_path / "prompts.jsonl"
    entries = [json.dumps(LINES[0]), "", *(json.dumps({"prompt": text}) for text in LINES[1:])]
    file.write_text("\n".join(entries), encoding="utf-8")
    return file


def test_every_line_of_a_file_is_answered_in_order(
    ask: Run, tiny: dllm.DiffusionModel, lines: Path
) -> None:
    answers = dllm.generate(
        tiny, LINES, max_new_tokens=24, block_length=8, temperature=1.0, max_batch_size=2
    )
    how = ("generate", "--file", str(lines), "--temperature", "1", "--max-batch-size", "2")
    result = ask(*how)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "".join(answer.text + "\n" for answer in answers)
    assert result.stderr.count("tokens per forward") == len(LINES)
    entries = [json.loads(line) for line in ask(*how, "--json").stdout.split("\n")[:-1]]
    assert [entry["prompt"] for entry in entries] == LINES
    assert [entry["text"] for entry in entries] == [answer.text for answer in answers]
    assert all(entry["arguments"] == {"max_new_tokens": 24, "block_length": 8, "temperature": 1.0}
               for entry in entries)  # fmt: skip


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('"Tom"\n{"prompt": "Be', "line 2 of"),
        ('"Tom"\n{"text": "Ben"}', "line 2 of"),
        ('"Tom"\n{"prompt": "Ben", "seed": 3}', "are for dllm batch"),
        ('"Tom"\n\n17', "line 3 of"),
        ('"Tom"\n" "', "line 2 of"),
        ('"\\ud800"', "not valid UTF-8"),
        ("\n \n", "holds no prompts"),
        ("", "holds no prompts"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_answered(
    ask: Run, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content, encoding="utf-8")
    result = ask("generate", "--file", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1


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
    others = {"suppress_mask", "cache_salt", "structural_tag"}  # for parity, and for servers
    assert dllm.GenerationConfig.fields().keys() - others == Answers.PARAMETERS


def test_the_trace_is_written(ask: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    result = ask("generate", PROMPT, "--json", "--trace", str(file), "--top-candidates", "3")
    trace = json.loads(file.read_text(encoding="utf-8"))
    assert len(trace["steps"]) == json.loads(result.stdout)["nfe"]
    assert len(trace["steps"][0]["candidates"][0][1]) == 3


def test_every_line_has_its_trace(ask: Run, lines: Path) -> None:
    ask("generate", "--file", str(lines), "--trace", str(lines.with_name("t.json")))
    written = sorted(file.name for file in lines.parent.glob("t-*.json"))
    assert written == [f"t-{number}.json" for number in range(len(LINES))]
