"""``--server``: the same commands, answered by a server."""

from __future__ import annotations

import json
from pathlib import Path

import dllm
from tests.cli.conftest import Run

from .conftest import Served, Start

HOW = ("--max-new-tokens", "24", "--block-length", "8")
PROMPT = "Reverse this list: Tom, Anna, Ben"


def test_generate(cli: Run, served: Served, tiny: dllm.DiffusionModel, tmp_path: Path) -> None:
    trace = tmp_path / "run.json"
    done = cli("generate", PROMPT, "--server", served.url, *HOW, "--trace", str(trace), "--watch")
    plain = dllm.generate(tiny, PROMPT, max_new_tokens=24, block_length=8, trace=True)
    assert done.exit_code == 0, done.stderr
    assert done.stdout == plain.text + "\n"
    assert f"{plain.nfe} forwards" in done.stderr and "«" in done.stderr
    assert len(json.loads(trace.read_text())["steps"]) == plain.nfe
    shown = cli("generate", PROMPT, "--server", served.url, *HOW, "--json", "--raw",
                "--top-candidates", "2")  # fmt: skip
    raw = dllm.generate(tiny, PROMPT, max_new_tokens=24, block_length=8, chat=False)
    assert json.loads(shown.stdout)["text"] == raw.text
    assert json.loads(shown.stdout)["computed"] == raw.computed


def test_chat(cli: Run, served: Served, tiny: dllm.DiffusionModel) -> None:
    done = cli("chat", "--server", served.url, *HOW, stdin="one\ntwo\n/quit\n")
    assert done.exit_code == 0, done.stderr
    first = dllm.generate(tiny, [{"role": "user", "content": "one"}], max_new_tokens=24,
                          block_length=8)  # fmt: skip
    assert done.stdout.startswith(first.text)


def test_chat_with_a_bundled_model(cli: Run, start: Start) -> None:
    """It knows one question at a time, here as without a server."""
    nano = dllm.load("nano")
    served = start(nano, name="little")
    questions = ["Compute 69 + 49.", "Reverse this list: Tom, Anna, Ben"]
    done = cli("chat", "--server", served.url, stdin="\n".join([*questions, ""]))
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines() == [r.text for r in dllm.generate(nano, questions)]
    assert "little was trained on single questions" in done.stderr


def test_errors_are_one_line(cli: Run, served: Served, start: Start,
                             tiny: dllm.DiffusionModel) -> None:  # fmt: skip
    for arguments, message in (
        (("--server", "http://127.0.0.1:9"), "does not answer"),
        (("--server", "nowhere"), "a server is like"),
        (("--server", served.url, "-s", "thresold"), "unknown sampler"),
        (("--server", served.url, "--dtype", "float32"), "--dtype is the server's"),
        (("--server", served.url, "--threads", "1"), "--threads is the server's"),
        (("--server", served.url, "--cfg-scale", "-1"), "cfg_scale must be"),
        (("--server", served.url, "-m", "other"), "does not exist"),
        (("--server", served.url, "--rule", "keyed"), "--rule goes with --verifier"),
    ):
        done = cli("generate", PROMPT, *arguments)
        assert (done.exit_code, done.stdout) == (2, ""), arguments
        assert message in done.stderr and done.stderr.count("\n") == 1
    locked = start(tiny, api_key="sesame")
    said = cli("generate", PROMPT, "--server", locked.url).stderr
    assert "API key" in said and "DLLM_API_KEY" in said
