"""Running the command line in the test process."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from dllm.cli.app import app

Run = Callable[..., Result]
command_of = cache(get_command)  # made once: 50 ms


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Run:
    """``cli("samplers", stdin="")``: the result with ``exit_code``, ``stdout``, ``stderr``."""
    monkeypatch.setattr("typer.testing._get_command", command_of)
    runner = CliRunner(env={"COLUMNS": "100", "NO_COLOR": "1"})

    def run(*arguments: str, stdin: str = "") -> Result:
        return runner.invoke(app, list(arguments), input=stdin, prog_name="dllm")

    return run


@pytest.fixture
def ask(cli: Run, tiny_folder: Path) -> Run:
    """``ask("generate", "prompt", ...)`` with the tiny model and a short canvas."""

    def run(command: str, *arguments: str, stdin: str = "") -> Result:
        short = () if command == "infill" else ("--max-new-tokens", "24", "--block-length", "8")
        return cli(command, *arguments, "--model", str(tiny_folder), *short, stdin=stdin)

    return run


@pytest.fixture(scope="session")
def causal_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A causal model as a checkpoint folder."""
    from ..drafting.conftest import make_verifier

    path = tmp_path_factory.mktemp("verifier")
    make_verifier("full").save_pretrained(path)
    return path
