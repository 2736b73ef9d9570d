"""``dllm compare``: one row per setting."""

import json

import pytest
from typer.testing import CliRunner

import dllm
from dllm.cli.app import app

from ..thin import some
from .conftest import Run

PROMPT = "Copy this list: Tom, Anna"


def test_settings_side_by_side(cli: Run, tiny_folder: object) -> None:
    options = ("-s", "llada", "-s", "threshold(tau={0.9,0.1})", "-c", "none", "-c", "dual")
    command = ["compare", PROMPT, "-m", str(tiny_folder), *options, "--max-new-tokens", "8"]
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    result = runner.invoke(app, command, prog_name="dllm")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("threshold(tau=") >= 4 and "6 settings" in result.stdout
    for column in ("Forwards", "Positions", "Seconds", "Text"):
        assert column in result.stdout


@pytest.mark.parametrize("columns", some(["60", "80", "200"], 1))
def test_texts_are_shown_in_any_width(cli: Run, tiny_folder: object, columns: str) -> None:
    command = ("compare", PROMPT, "-m", str(tiny_folder), "-s", "llada", "--max-new-tokens", "8")
    text = json.loads(cli(*command, "--json").stdout)["text"]
    runner = CliRunner(env={"COLUMNS": columns, "NO_COLOR": "1"})
    result = runner.invoke(app, list(command), prog_name="dllm")
    assert " ".join(text.split()[:3]) in " ".join(result.stdout.split())
    assert "1 setting, one warm-up" in " ".join(result.stdout.split())


@pytest.mark.parametrize("columns", ["20", "80"])
def test_figures_are_shown_in_any_width(tiny_folder: object, columns: str) -> None:
    command = ["compare", PROMPT, "-m", str(tiny_folder), "--max-new-tokens", "8", "-s",
               "prophet(early=15.0,mid=10.0,late=5.0)", "-s", "llada"]  # fmt: skip
    runner = CliRunner(env={"COLUMNS": columns, "NO_COLOR": "1"})
    shown = runner.invoke(app, command, prog_name="dllm").stdout
    head, rows = shown.split("───")[0].split(), shown.rpartition("───")[2].splitlines()[1:9]
    assert head == ["Sampler", "Cache", "Forwards", "Positions", "Tokens/forward", "Seconds"]
    assert sum(len(row.split()) == 6 for row in rows) == 2 and "…" not in shown


def test_figures_are_those_of_generate(
    cli: Run, tiny: dllm.DiffusionModel, tiny_folder: object
) -> None:
    command = ("compare", "-m", str(tiny_folder), "--max-new-tokens", "16", "--json")
    lines = cli(*command, "-s", "threshold", "-s", "eb", stdin=PROMPT).stdout.splitlines()
    result = [json.loads(line) for line in lines]
    assert [entry["sampler"] for entry in result] == ["threshold", "eb"]
    out = dllm.generate(tiny, PROMPT, sampler="eb", max_new_tokens=16)
    assert (result[1]["nfe"], result[1]["text"]) == (out.nfe, out.text)


def test_samplers_get_the_options_they_take(cli: Run, tiny_folder: object) -> None:
    """dream has no blocks."""
    command = ("compare", PROMPT, "-m", str(tiny_folder), "--max-new-tokens", "16")
    result = cli(*command, "-s", "dream", "-s", "llada", "--block-length", "8", "--json")
    assert result.exit_code == 0, result.stderr
    assert [json.loads(line)["sampler"] for line in result.stdout.splitlines()] == [
        "dream", "llada"
    ]  # fmt: skip
