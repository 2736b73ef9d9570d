"""``dllm serve-drafter`` in a process of its own, asked by a verifier in this one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from .conftest import Run

PROMPT = "Reverse this list: Tom, Anna, Ben"


@pytest.fixture
def service() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address that a service with nano prints, and its process."""
    arguments = ["serve-drafter", "--drafter", "prompt_lookup(n=9)", "--drafter", "nano",
                 "--window", "8", "--port", "0"]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "dllm", *arguments], stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert process.stderr is not None
    line = process.stderr.readline()
    assert line.startswith("drafting at http://127.0.0.1:"), line
    yield line.split()[-1], process
    process.kill()
    process.wait()
    process.stderr.close()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be halted")
def test_a_verifier_is_helped_and_survives_the_end_of_the_service(
    cli: Run, service: tuple[str, subprocess.Popen[str]]
) -> None:
    url, process = service

    def ask(deadline: float) -> dict[str, object]:
        drafter = f"remote(url='{url}', deadline={deadline})"
        outcome = cli("generate", PROMPT, "--verifier", "nano-ar", "--drafter", drafter, "--json",
                    "--controller", "fixed(k=6)")  # fmt: skip
        assert outcome.exit_code == 0, outcome.stderr
        payload: dict[str, object] = json.loads(outcome.stdout)
        return payload

    expected = cli("generate", PROMPT, "--verifier", "nano-ar", "--drafter", "none").stdout
    helped = ask(30)
    assert helped["text"] == expected.strip()
    assert helped["accepted"] >= 4  # type: ignore[operator]
    process.send_signal(signal.SIGSTOP)
    late = ask(0.2)
    process.kill()
    process.wait()
    gone = ask(30)
    for result in (late, gone):
        assert result["text"] == expected.strip()
        assert result["drafted"] == 0


def test_an_address_in_use_is_one_line(cli: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = cli("serve-drafter", "--drafter", "prompt_lookup", "--port", port)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}")
