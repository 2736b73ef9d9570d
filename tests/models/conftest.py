"""Tiny checkpoints, and copies of them that tests may damage."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dllm.models import DiffusionModel, load


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The folder of the tiny official checkpoints, ``llada-tiny`` and ``dream-tiny``."""
    here = Path(__file__).resolve().parents[1] / "golden" / "data"
    return Path(os.environ.get("DLLM_GOLDENS") or here)


@pytest.fixture(scope="session")
def llada(checkpoints: Path) -> DiffusionModel:
    return load(checkpoints / "llada-tiny")


@pytest.fixture(scope="session")
def dream(checkpoints: Path) -> DiffusionModel:
    return load(checkpoints / "dream-tiny")


Copy = Callable[..., Path]


@pytest.fixture
def copy(checkpoints: Path, tmp_path: Path) -> Copy:
    """``copy("llada-tiny", drop=[...], **fields)``: a copy whose config.json is edited."""

    def make(name: str, drop: tuple[str, ...] = (), **fields: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in (checkpoints / name).iterdir():
            shutil.copyfile(file, folder / file.name)
        config = json.loads((folder / "config.json").read_text()) | fields
        kept = {key: value for key, value in config.items() if key not in drop}
        (folder / "config.json").write_text(json.dumps(kept))
        return folder

    return make
