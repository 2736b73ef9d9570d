"""Where the recorded outputs of the official implementations are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def goldens_dir() -> Path:
    """``DLLM_GOLDENS`` if set, else the copy in the repository.

    It holds ``forward/``, ``traces/`` and one folder per tiny model.
    """
    return Path(os.environ.get("DLLM_GOLDENS") or Path(__file__).parent / "data")


@pytest.fixture(scope="session")
def goldens() -> Path:
    return goldens_dir()
