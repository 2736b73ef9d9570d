"""Answers with a form over HTTP: expressions, choices, JSON, calls of tools."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import dllm
from tests.cli.conftest import Run

from .conftest import Served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "one"}]
HOW: Any = {"messages": HELLO, "max_tokens": 24, "block_length": 8}


def content(served: Served, **more: Any) -> str:
    answer = served.post(CHAT, HOW | more)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_expressions_and_choices(served: Served, tiny: dllm.DiffusionModel) -> None:
    """The same text as in a program, and one of the form; streamed, too."""
    regex = "[0-9]{2}-[a-z]{3}"
    text = content(served, structured_outputs={"regex": regex})
    assert re.fullmatch(regex, text)
    assert text == dllm.generate(tiny, HELLO, regex=regex, max_new_tokens=24, block_length=8).text
    body = {**HOW, "structured_outputs": {"regex": regex}, "stream": True, "temperature": 1,
            "seed": 3}  # fmt: skip
    pieces = [
        json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
        for line in served.post(CHAT, body).text.splitlines()
        if line.startswith("data: {")
    ]
    assert re.fullmatch(regex, "".join(pieces))
    assert content(served, structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    plain = {"prompt": "one", "max_tokens": 24, "structured_outputs": {"choice": ["a", "b"]}}
    assert served.post(TEXT, plain).json()["choices"][0]["text"] in ("a", "b")


def test_what_cannot_be_is_refused(served: Served) -> None:
    for form, word in (
        ({"regex": "("}, "not well formed"), ({"regex": "a{200}"}, "max_new_tokens"),
        ({"regex": r"(a)\1"}, "references"),
    ):  # fmt: skip
        answer = served.post(CHAT, {**HOW, "structured_outputs": form})
        assert answer.status_code == 400 and word in answer.json()["error"]["message"], answer.text
    both = {**HOW, "structured_outputs": {"regex": "a"}, "stop": "b"}
    assert "stop_strings does not go with regex" in served.post(CHAT, both).text


def test_a_file_of_requests(cli: Run, tiny_folder: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    form = {"structured_outputs": {"choice": ["yes", "no"]}}
    file.write_text("\n".join(json.dumps({"prompt": p, **form}) for p in ("one", "two")))
    done = cli("batch", str(file), "-o", str(out), "--model", str(tiny_folder),
               "--max-new-tokens", "8")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    for line in out.read_text().splitlines():
        body = json.loads(line)["response"]["body"]
        assert body["choices"][0]["message"]["content"] in ("yes", "no")
