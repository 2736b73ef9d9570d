"""``dllm chat`` and ``dllm infill``."""

import json
from pathlib import Path

import pytest
from _pytest.monkeypatch import MonkeyPatch

import dllm
from dllm.cli import chat as chat_module
from dllm.cli.app import Terminated

from ..thin import some
from .conftest import Run

Messages = list[dict[str, str]]


def say(model: dllm.DiffusionModel, messages: Messages, text: str) -> str:
    """One turn, as the API has it; ``messages`` grow."""
    messages.append({"role": "user", "content": text})
    answer: str = dllm.generate(model, messages, max_new_tokens=24, block_length=8).text
    messages.append({"role": "assistant", "content": answer})
    return answer


@pytest.mark.parametrize("watch", some([True, False], 1))
def test_the_conversation_is_kept(ask: Run, tiny: dllm.DiffusionModel, watch: bool) -> None:
    result = ask("chat", *(["--watch"] if watch else []), stdin="Tom\n\nAnna\n/quit\nnever\n")
    messages: Messages = []
    answers = [say(tiny, messages, text) for text in ("Tom", "Anna")]
    assert result.exit_code == 0
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    assert result.stderr.count("tokens per forward") == 2
    assert ("░" in result.stderr) == watch


def test_a_system_message_survives_a_reset(ask: Run, tiny: dllm.DiffusionModel) -> None:
    result = ask("chat", "--system", "Count.", stdin="Tom\n/reset\nTom\n")
    answer = say(tiny, [{"role": "system", "content": "Count."}], "Tom")
    assert result.stdout == f"{answer}\n" * 2


@pytest.mark.slow
def test_an_error_leaves_the_conversation_usable(ask: Run, tiny: dllm.DiffusionModel) -> None:
    result = ask("chat", stdin=f"Tom\n{'Ben ' * 200}\nAnna\n/what\n")
    messages: Messages = []
    answers = [say(tiny, messages, text) for text in ("Tom", "Anna")]
    assert result.exit_code == 0
    assert result.stdout == "".join(f"{answer}\n" for answer in answers)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "the context" in errors[0]


def test_a_stopped_answer_leaves_the_conversation_usable(
    ask: Run, tiny: dllm.DiffusionModel, monkeypatch: MonkeyPatch
) -> None:
    real = chat_module.Conversation.answer
    calls: list[int] = []

    def interrupted(self: chat_module.Conversation) -> dllm.Result:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(chat_module.Conversation, "answer", interrupted)
    result = ask("chat", stdin="Ben\nTom\n")
    assert result.stdout == say(tiny, [], "Tom") + "\n"
    assert "stopped" in result.stderr


def test_sigterm_ends_more_than_an_answer(ask: Run, monkeypatch: MonkeyPatch) -> None:
    def terminated(self: chat_module.Conversation) -> dllm.Result:
        raise Terminated  # as the handler of the signal does

    monkeypatch.setattr(chat_module.Conversation, "answer", terminated)
    result = ask("chat", stdin="Ben\nTom\n")
    assert result.exit_code == 143 and "ended by SIGTERM" in result.stderr


def test_a_model_without_a_template_is_refused(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    for file in tiny_folder.iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    result = cli("chat", "--model", str(tmp_path))
    assert result.exit_code == 2
    assert "has no chat template: use dllm generate" in result.stderr


def test_infill_keeps_the_text_around_the_holes(ask: Run, tiny: dllm.DiffusionModel) -> None:
    text = "Tom has [[3]] apples"
    result = ask("infill", text)
    assert result.exit_code == 0
    assert result.stdout == dllm.infill(tiny, text).text + "\n"
    assert result.stdout.startswith("Tom has ") and result.stdout.endswith(" apples\n")
    assert "tokens per forward" in result.stderr


def test_infill_from_stdin_as_json(ask: Run, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    result = ask("infill", "--json", "--trace", str(file), stdin="Tom [[2]] and [[2]] Ben\n")
    outcome = json.loads(result.stdout)
    assert outcome["nfe"] == len(json.loads(file.read_text(encoding="utf-8"))["steps"])
    assert outcome["text"].startswith("Tom ") and outcome["text"].endswith("Ben")


def test_stdin_is_read_as_a_file_is(ask: Run, tmp_path: Path) -> None:
    """Windows marks its beginning and ends lines in its own way."""
    text, file = "\ufeffTom has\r\n[[2]] apples\r\n", tmp_path / "dos.txt"
    file.write_bytes(text.encode())
    from_file, from_stdin = ask("infill", "--file", str(file)), ask("infill", stdin=text)
    assert from_stdin.stdout == from_file.stdout
    assert from_stdin.stdout.startswith("Tom has\n")
