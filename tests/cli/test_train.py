"""``dllm train nano`` builds a recipe and follows the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dllm.train import nano

from .conftest import Run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nano.Recipe, Path, dict[str, Any]]]:
    """What the command asked to be trained, in place of training it."""
    asked: list[tuple[nano.Recipe, Path, dict[str, Any]]] = []

    def train(recipe: nano.Recipe, folder: Path, **options: Any) -> Iterator[dict[str, float]]:
        asked.append((recipe, folder, options))
        yield {"step": 50, "loss": 1.25, "seconds": 1.0}

    monkeypatch.setattr(nano, "train", train)
    monkeypatch.setattr(nano, "export", lambda run, out: None)
    return asked


def test_defaults_are_the_recipe(cli: Run, runs: list[Any]) -> None:
    result = cli("train", "nano")
    assert (result.exit_code, result.stdout) == (0, "")
    assert runs == [
        (
            nano.Recipe(),
            Path("runs/nano"),
            {"device": "cpu", "compile_model": True, "weights_from": None},
        ),
    ]
    assert f"step 50/{nano.Recipe().steps} loss 1.2500" in result.stderr


def test_options_reach_the_recipe(cli: Run, runs: list[Any], tmp_path: Path) -> None:
    cli("train", "nano", "--objective", "causal", "--steps", "100", "--seed", "4", "--threads", "1",
        "--no-compile", "-o", str(tmp_path))  # fmt: skip
    ((recipe, folder, options),) = runs
    assert recipe == nano.Recipe.of("causal", steps=100, seed=4)
    assert (folder, options["compile_model"]) == (tmp_path, False)


def test_the_sibling_has_a_folder_of_its_own(cli: Run, runs: list[Any]) -> None:
    cli("train", "nano", "--objective", "causal")
    assert runs[0][1] == Path("runs/nano-ar")
