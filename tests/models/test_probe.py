"""Tokenizers and chat templates that take for ever, or all memory, are refused before they run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import dllm
from dllm.core.errors import CheckpointError
from dllm.models.probe import probe
from tests.cli.conftest import Run
from tests.cli.conftest import cli as cli

from ..thin import some

NANO = Path(dllm.__file__).parent / "nano" / "nano"
Harm = Callable[[Path], None]
DOUBLED = {"pattern": {"String": "a"}, "content": "aa"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All files of the bundled model but its weights."""
    for file in NANO.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path)
    return tmp_path


def template(text: str) -> Harm:
    def write(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text)

    return write


def steps(part: str, kind: str) -> Harm:
    """Steps of the tokenizer that double every "a" 40 times."""

    def write(folder: Path) -> None:
        file = folder / "tokenizer.json"
        many = {"type": "Sequence", kind: [{"type": "Replace", **DOUBLED}] * 40}
        file.write_text(json.dumps({**json.loads(file.read_text()), part: many}))

    return write


LONG = template("{{ 'a' * 50000000 }}")
ENDLESS = {
    "loops": template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
                      "{% endfor %}"),
    "power": template("{{ 7 ** (7 ** 77) }}"),
    "doubling": template("{% set n = namespace(s='ab') %}{% for i in range(60) %}"
                         "{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}"),
    "normalizer": steps("normalizer", "normalizers"),
    "decoder": steps("decoder", "decoders"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("command", "code"), some([("serve", 2), ("doctor -m", 1)], 1))
def test_a_template_that_makes_much_of_little_is_refused(
    cli: Run, folder: Path, command: str, code: int
) -> None:
    LONG(folder)
    result = cli(*command.split(), str(folder))
    said = " ".join((result.stderr + result.stdout).split())
    assert "chat_template.jinja is refused: a process that renders a short sample" in said
    assert result.exit_code == code and "made 50,000,000 characters" in said


@pytest.mark.slow
def test_what_is_well_or_cannot_be_read_passes(folder: Path) -> None:
    probe(folder)
    (folder / "tokenizer.json").write_text("{")
    probe(folder)  # loading it says what is wrong
    (folder / "tokenizer.json").unlink()
    probe(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS)
def test_what_never_ends_or_takes_all_memory_is_refused(folder: Path, name: str) -> None:
    ENDLESS[name](folder)
    file = "tokenizer.json" if name in ("normalizer", "decoder") else "chat_template.jinja"
    with pytest.raises(CheckpointError, match=rf"{file} is refused: .* ended, or took more than"):
        probe(folder, seconds=20)
