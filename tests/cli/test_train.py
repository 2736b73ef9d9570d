"""``dllm train``: a command's run leaves what it says it leaves."""

import errno
import fcntl
import json
import os
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import SafetensorError

import dllm
from dllm.cli.dflash import resumable
from dllm.cli.train import Conversion
from dllm.core.errors import ConfigError
from dllm.core.json_lines import lock

from ..thin import some
from .conftest import Run

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.slow
def test_a_diffusion_model_learns_from_its_own_trajectories(cli: Run, tmp_path: Path) -> None:
    command = "parallel --rounds 2 --samples 2 --temperature 1"
    result = cli("train", *command.split(), "--model", "nano", "--answers", "16", "--steps", "2",
                 "--rows", "4", "--rank", "4", "-o", str(tmp_path), "--held-out", "4")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "tokens per forward" in result.stderr
    adapted = dllm.load("nano", adapter=tmp_path / "adapter", merge_adapter=True)
    assert dllm.generate(adapted, "What is 4 + 5?").text == "4 + 5 = 9."
    with pytest.raises(ConfigError, match="merge_adapter"):
        dllm.load("nano", adapter=tmp_path / "adapter").save_pretrained(tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_answers_are_written_without_a_step(cli: Run, tmp_path: Path) -> None:
    few = ("train", "parallel", "--model", "nano", "--answers", "4", "--tasks", "copy",
           "--held-out", "1", "-o", str(tmp_path))  # fmt: skip
    result = cli(*few, "--steps", "0")
    assert result.exit_code == 0, result.stderr
    assert len((tmp_path / "trajectories.jsonl").read_text().splitlines()) == 4
    assert not (tmp_path / "adapter").exists()
    # What does not change the answers may change until there is a checkpoint.
    result = cli(*few, "--steps", "1")
    assert result.exit_code == 2 and "4 answers are too few for batches of 8: " in result.stderr
    assert "4/4 prompts decoded" not in result.stderr
    result = cli(*few, "--steps", "1", "--rows", "2")
    assert result.exit_code == 0 and (tmp_path / "adapter").exists()
    result = cli(*few, "--steps", "2", "--rows", "2")
    assert result.exit_code == 2 and "holds a run of another recipe" in result.stderr


@pytest.mark.slow
def test_an_autoregressive_model_learns_to_decode_in_blocks(cli: Run, tmp_path: Path) -> None:
    result = cli("train", "convert", "--model", "nano-ar", "--answers", "16",
                 "--steps", "2", "--rows", "4", "--rounds", "2", "-o", str(tmp_path),
                 "--held-out", "4")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    model = dllm.load(tmp_path / "model")
    assert (model.facts.mask_kind, model.facts.block_length) == ("block_causal", 4)
    assert dllm.generate(model, "What is 4 + 5?", max_new_tokens=8).nfe >= 1


def test_the_guide_names_the_default_learning_rate_of_a_conversion() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    named = guide.partition("The default learning rate, ")[2].partition(",")[0]
    assert float(named) == Conversion(model="nano-ar").learning_rate


@pytest.mark.parametrize(("arguments", "said"), [
    (("--rank", "8"), "No such option: --rank"),  # it trains all weights, in float32
    (("--dtype", "bfloat16"), "No such option: --dtype"),
    (("--model", "nano"), "nano cannot become a model of blocks"),
])  # fmt: skip
def test_a_conversion_that_cannot_be_is_refused(
    cli: Run, arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = cli("train", "convert", "--model", "nano-ar", "-o", str(tmp_path / "run"), *arguments)
    assert result.exit_code == 2 and said in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("command", "said"), [
    ("deer --prompts FILE --examples 3", "--prompts leaves nothing for --examples"),
    ("parallel --model nano --prompts FILE --tasks copy --answers 3", "for --tasks and --answers"),
    ("parallel --model nano --rank 0 --dtype bfloat16", "leave --dtype out"),
    ("parallel --model nano --samples 2", "give --temperature"),
    ("parallel --model nano --data FILE --answers 3", "--data in one round leaves nothing"),
    ("dflash --verifier nano-ar --data FILE --answers 3", "--data leaves nothing for --answers"),
    ("dflash --verifier nano-ar --data ANSWERS --max-new-tokens 9", "nothing for --max-new-tokens"),
    ("dflash --verifier nano-ar --gamma 3", "--loss dpace leaves nothing for --gamma"),
    ("dflash --verifier nano-ar --weights-from x --init random", "leaves nothing for --init"),
])  # fmt: skip
def test_an_option_without_effect_is_refused(
    cli: Run, command: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("Copy: a\nCopy: b\n")
    (tmp_path / "answers.jsonl").write_text('{"ids": [5, 6, 7], "answer": 1}\n')
    given = command.replace("FILE", str(tmp_path / "prompts.txt"))
    given = given.replace("ANSWERS", str(tmp_path / "answers.jsonl"))
    result = cli("train", *given.split(), "-o", str(tmp_path / "run"))
    assert result.exit_code == 2 and said in result.stderr
    assert not [*tmp_path.glob("run/*")]


@pytest.mark.parametrize(
    "command",
    "deer;dflash --verifier nano-ar;parallel --model nano;convert --model nano-ar".split(";"),
)
def test_every_training_says_how_often_and_to_whom(cli: Run, command: str, tmp_path: Path) -> None:
    how = ("train", *command.split(), "-o", str(tmp_path))
    result = cli(*how, "--log-every", "1", "--report-to", "smoke-signals")
    assert result.exit_code == 2 and "unknown integration 'smoke-signals'" in result.stderr
    assert cli(*how, "--log-every", "0").exit_code == 2


@pytest.mark.parametrize(("how", "why"), [
    (("--mask-token-id", "999"), "mask_token_id 999 is no id of 528 tokens"),
    ((), "start from random weights"),
    (("--init", "random"), "a head without bias"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused_before_answers_are_written(
    cli: Run, how: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    verifier = dllm.load("nano-ar")
    hf: Any = deepcopy(verifier.hf)
    if how == ("--init", "random"):
        hf.lm_head.bias = torch.nn.Parameter(torch.zeros(528))
    elif not how:
        hf.get_decoder().layers[-1].mlp.up_proj = torch.nn.Linear(2, 2)
    with patch("dllm.cli.dflash.loaded", return_value=replace(verifier, hf=hf)):
        result = cli("train", "dflash", "--verifier", "nano-ar", *how, "-o", str(tmp_path))
    assert result.exit_code == 2 and why in result.stderr
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "command",
    "deer;dflash --verifier nano-ar;parallel --model nano;convert --model nano-ar".split(";"),
)
def test_another_run_in_the_folder_is_left_alone(cli: Run, command: str, tmp_path: Path) -> None:
    """One of another recipe, and one that is at work."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "recipe.json").write_text('{"seed": 7}')
    result = cli("train", *command.split(), "-o", str(other))
    assert result.exit_code == 2 and "holds a run of another recipe" in result.stderr
    assert [file.name for file in other.iterdir()] == ["recipe.json"]
    opened = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(opened, fcntl.LOCK_EX)
    result = cli("train", *command.split(), "-o", str(tmp_path))
    os.close(opened)
    assert result.exit_code == 2 and f"another run writes to {tmp_path}" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["other"]


def test_a_system_that_opens_no_folders_and_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "open")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with resumable(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()
    lock(None, tmp_path)


def test_prompts_that_are_all_held_out_are_refused(cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Copy: a\nCopy: b\n")
    how = ("train", "parallel", "--model", "nano", "--prompts", str(file),
           "-o", str(tmp_path / "r"))  # fmt: skip
    for held_out in ("2", "64"):
        result = cli(*how, "--held-out", held_out)
        assert result.exit_code == 2
        assert f"has 2 prompts, and {held_out} are held out" in result.stderr
    assert not (tmp_path / "r").exists()
    file.with_suffix(".jsonl").write_text('"Copy: a"\n{"prompt": "Copy: b"}\n')
    lines = cli(*how[:5], str(file.with_suffix(".jsonl")), *how[6:], "--held-out", "2")
    assert lines.exit_code == 2 and "has 2 prompts" in lines.stderr
    result = cli(*how, "--held-out", "1", "--steps", "0")
    assert result.exit_code == 0, result.stderr
    assert len((tmp_path / "r" / "trajectories.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("command", [
    "deer --prompts FILE", "dflash --verifier nano-ar --data FILE",
    "convert --model nano-ar --prompts FILE --held-out 1",
])  # fmt: skip
def test_a_prompt_without_room_for_an_answer_is_named(
    cli: Run, command: str, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "Copy: a"}}\n{{"prompt": "Copy: {"a b " * 80}"}}\n')
    given = command.replace("FILE", str(file)).split()
    result = cli("train", *given, "-o", str(tmp_path / "run"))
    assert result.exit_code == 2 and "128" in result.stderr
    assert f"{file}, line 2: " in result.stderr or f"prompt 2 of {file} has" in result.stderr
    assert not [*tmp_path.glob("run/*")]


@pytest.mark.parametrize(
    ("line", "why"),
    some([
        ({"ids": [5, 6, 99999], "answer": 1, "order": [0, 1]}, "99999 is no id"),
        ({"ids": [5, -6, 7], "answer": 1, "order": [0, 1]}, "-6 is no id"),
        ({"ids": [5, 6.5, 7], "answer": 1, "order": [0, 1]}, "6.5 is no id"),
        ({"ids": [5, 6, 7], "answer": 4, "order": []}, "an answer from 4 on"),
        ({"ids": [], "answer": 0, "order": []}, "0 ids for a context of 2048"),
        ({"ids": [5] * 2049, "answer": 1, "order": [0] * 2048}, "2049 ids for a context"),
        ({"ids": [5, 6, 7], "answer": -1, "order": [0]}, "an answer from -1 on"),
        ({"ids": [5, 6, 7], "answer": 1, "order": [0]}, "an order of 1 steps for 2"),
        ({"ids": [5, 6, 7], "answer": 1}, "'order'"),
    ], 2),
)  # fmt: skip
def test_damaged_answers_are_named(cli: Run, tmp_path: Path, line: object, why: str) -> None:
    file = tmp_path / "answers.jsonl"
    good = {"ids": [5, 6, 7], "answer": 1, "order": [0, 1]}
    file.write_text(json.dumps(good) + "\n" + json.dumps(line) + "\n")
    result = cli("train", "parallel", "--model", "nano", "--data", str(file), "--rows", "1",
                 "--steps", "1", "--held-out", "1", "-o", str(tmp_path / "run"))  # fmt: skip
    assert result.exit_code == 2 and f"{file}, line 2: " in result.stderr
    assert why in result.stderr and result.stderr.splitlines()[-1].startswith("error: ")


FULL = SafetensorError("I/O error: No space left on device (os error 28)")
DAMAGED = SafetensorError("Error while deserializing header: header too large")


@pytest.mark.parametrize(
    ("error", "full"), [(OSError(errno.ENOSPC, "No space"), True), (FULL, True), (DAMAGED, False)]
)
def test_a_full_disk_is_told_in_a_sentence(
    error: Exception, full: bool, cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("dllm.train.recipes.distill.train", train)
    result = cli("train", "parallel", "--model", "nano", "-o", str(tmp_path))
    assert (result.exit_code == 2) == full
    assert (f"no room is left in {tmp_path}: make some" in result.stderr) == full


def test_an_interrupted_run_says_how_to_go_on(
    cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dllm.train.loop.resume", interrupt)
    monkeypatch.setattr("sys.argv", ["/somewhere/dllm", "train", "parallel", "-o", "my run"])
    result = cli("train", "parallel", "--model", "nano", "--answers", "4", "--tasks", "copy",
                 "--rows", "2", "--held-out", "1", "-o", str(tmp_path))  # fmt: skip
    assert result.exit_code == 130
    assert "to go on: dllm train parallel -o 'my run'" in result.stderr
