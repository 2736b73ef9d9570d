"""Prompts as token ids, also of models that came without a tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import dllm
from dllm.request.prompts import encode

from .conftest import Run

SHORT = ("--max-new-tokens", "8", "--block-length", "8")


@pytest.fixture(scope="module")
def bare(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model without its tokenizer."""
    folder = tmp_path_factory.mktemp("bare") / "tiny"
    shutil.copytree(tiny_folder, folder)
    for name in ("tokenizer.json", "vocab.json"):
        (folder / name).unlink(missing_ok=True)
    return str(folder)


@pytest.mark.parametrize("form", ["5 17 9", "5,17,9", "[5, 17, 9]"])
def test_ids_are_the_prompt(cli: Run, tiny: dllm.DiffusionModel, bare: str, form: str) -> None:
    expected = dllm.generate(tiny, [5, 17, 9], max_new_tokens=8, block_length=8).tokens
    record = json.loads(cli("generate", "--ids", form, "-m", bare, "--json", *SHORT).stdout)
    assert record["tokens"] == expected and record["prompt_length"] == 3
    shown = cli("generate", "--ids", form, "-m", bare, *SHORT).stdout
    assert shown == " ".join(map(str, expected)) + "\n"


def test_ids_are_the_text_they_stand_for(
    cli: Run, tiny: dllm.DiffusionModel, tiny_folder: Path
) -> None:
    model = ("-m", str(tiny_folder), *SHORT)
    ids = " ".join(map(str, encode(tiny, "Tom and Anna").tolist()))
    assert cli("generate", "--ids", ids, *model).stdout == cli(
        "generate", "Tom and Anna", *model
    ).stdout  # fmt: skip


def test_files_of_ids(cli: Run, tiny: dllm.DiffusionModel, bare: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"5 17 9"\n"7"\n')
    shown = cli("generate", "--ids", "--file", str(file), "-m", bare, *SHORT).stdout
    expected = dllm.generate(tiny, [[5, 17, 9], [7]], max_new_tokens=8, block_length=8)
    assert shown.splitlines() == [" ".join(map(str, answer.tokens)) for answer in expected]


def test_infill_and_compare_and_a_verifier(cli: Run, bare: str) -> None:
    filled = cli("infill", "--ids", "[5, -1, 9]", "-m", bare)
    assert filled.exit_code == 0
    words = filled.stdout.split()
    assert (words[0], words[2], len(words)) == ("5", "9", 3)
    assert cli("compare", "--ids", "5 17 9", "-m", bare, *SHORT).exit_code == 0
    drafted = cli(
        "generate", "--ids", "5 17 9", "--verifier", "nano-ar", "--tokenizer", "nano",
        "--drafter", "prompt_lookup", "--max-new-tokens", "8", "--json",
    )  # fmt: skip
    expected = dllm.speculate("nano-ar", None, [5, 17, 9], max_new_tokens=8).tokens
    assert json.loads(drafted.stdout)["tokens"] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--ids", "five"), "--ids takes whole numbers"),
        (("generate", "--ids", "5", "--raw"), "--raw is for texts"),
        (("generate", "--ids", "5", "--watch"), "no text to watch"),
        (("generate", "--ids", "999999"), "outside the vocabulary"),
        (("generate", "--ids", "5", "--delay", "1"), "add --watch"),
        (("compare", "--ids", "5", "--raw"), "--raw is for texts"),
        (("generate", "Tom"), "without a tokenizer"),
    ],
)
def test_bad_ids(cli: Run, bare: str, arguments: tuple[str, ...], message: str) -> None:
    result = cli(*arguments, "-m", bare, "--max-new-tokens", "8")
    assert (result.exit_code, result.stdout) == (2, "") and message in result.stderr
