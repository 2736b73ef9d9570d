"""What the command line says of models that know a few tasks only."""

import pytest

import dllm
from dllm.cli.bundled import EXAMPLE, unknown_words
from dllm.cli.infill import infill
from dllm.eval.problems import find_task

from ..thin import some
from .conftest import Run


@pytest.fixture(autouse=True)
def not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dllm.cli.bundled._warned", False)


@pytest.mark.parametrize("task", ["fact", "sum", "story1", "story2", "copy", "insert", "sudoku"])
def test_the_words_of_its_tasks_are_known(nano: dllm.DiffusionModel, task: str) -> None:
    prompts = [example.prompt for example in find_task(task).examples(40)]
    assert unknown_words(nano, prompts) == []


def test_other_words_are_not(nano: dllm.DiffusionModel) -> None:
    asked = ["What is the capital of France?", "Straße 5, capital"]
    assert unknown_words(nano, asked) == ["capital", "of", "France", "Straße"]
    assert unknown_words(nano, [EXAMPLE]) == []


@pytest.mark.parametrize("command", some(["infill", "generate", "compare"], 1))
def test_they_are_warned_of(cli: Run, command: str) -> None:
    prompt = "France has[[1]]" if command == "infill" else "France"
    short = [] if command == "infill" else ["--max-new-tokens", "8"]
    result = cli(command, prompt, *short)
    assert result.exit_code == 0
    assert "never saw 'France'; it knows lists" in result.stderr
    assert "warning" not in cli(command, prompt, *short).stderr  # once in a process
    assert EXAMPLE in result.stderr and "warning" not in result.stdout


@pytest.mark.slow
def test_known_words_and_other_models_are_not(cli: Run, ask: Run) -> None:
    assert "warning" not in cli("generate", EXAMPLE, "--max-new-tokens", "16").stderr
    assert "warning" not in ask("generate", "France").stderr


def test_chat_asks_nano_single_questions(cli: Run, nano: dllm.DiffusionModel) -> None:
    questions = ["Sort this list: Zoe, Ben, Mia", "Compute 1 + 1.", "Where is Rome?"]
    result = cli("chat", "--max-new-tokens", "32", stdin="\n".join(questions))
    start, *rest = result.stderr.splitlines()[1:]
    assert "single questions" in start and "reverse" in start
    alone = [dllm.generate(nano, question, max_new_tokens=32).text for question in questions]
    assert result.stdout.splitlines() == alone and alone[0] == "Ben, Mia, Zoe"
    (warning,) = [line for line in rest if "never saw" in line]
    assert "'Where', 'Rome'" in warning


def test_the_advertised_hole_is_filled_right(cli: Run) -> None:
    command = (infill.__doc__ or "").split("Try: dllm infill ")[1].split("\n")[0]
    assert command in cli("infill", "--help").stdout
    assert cli("infill", command.strip('"')).stdout == "23 + 12: 3 + 2 = 5, 2 + 1 = 3: 35.\n"
