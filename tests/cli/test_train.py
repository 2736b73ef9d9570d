"""``dllm train``: a command's run leaves what it says it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dllm

from ..thin import some
from .conftest import Run

pytestmark = pytest.mark.filterwarnings("default")


def test_nano_is_trained_and_written(cli: Run, tmp_path: Path) -> None:
    result = cli("train", "nano", "--objective", "causal", "--steps", "2", "--seed", "4",
                 "--no-compile", "--examples", "0", "-o", str(tmp_path))  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, "")
    assert "2 steps of the causal recipe" in result.stderr
    recipe = json.loads((tmp_path / "nano-ar" / "recipe.json").read_text())
    assert (recipe["objective"], recipe["steps"], recipe["seed"]) == ("causal", 2, 4)
    model = dllm.load(tmp_path / "nano-ar")
    assert model.facts.mask_kind == "causal"


def test_another_run_is_not_overwritten(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text('{"seed": 7}')
    result = cli("train", "nano", "--steps", "2", "-o", str(tmp_path))
    assert result.exit_code == 2 and "another recipe" in result.stderr


@pytest.mark.parametrize("command", some(["parallel", "repair"], 1))
def test_a_diffusion_model_learns_from_its_own_trajectories(
    cli: Run, command: str, tmp_path: Path
) -> None:
    result = cli("train", command, "--model", "nano", "--answers", "24", "--steps", "2",
                 "--rows", "4", "--rank", "4", "-o", str(tmp_path), "--held-out", "8")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "tokens per forward" in result.stderr
    adapted = dllm.load("nano", adapter=tmp_path / "adapter", merge_adapter=True)
    assert dllm.generate(adapted, "What is 4 + 5?").text == "4 + 5 = 9."


def test_a_dry_run_needs_no_weights(cli: Run) -> None:
    for arguments in (("parallel", "--model", "nano"), ("convert", "--model", "nano-ar")):
        result = cli("train", *arguments, "--dry-run", "--tflops", "100", "--memory", "80")
        assert result.exit_code == 0, result.stderr
        assert "tokens per second" in result.stderr and "GB" in result.stderr
