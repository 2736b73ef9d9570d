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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``-n``, cases that are decoded together go to the same worker."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        together = getattr(getattr(item, "module", None), "TOGETHER", None)
        if together is not None and hasattr(item, "callspec") and "case" in item.callspec.params:
            group = together.group(item.callspec.params["case"])
            if group is not None:
                item.add_marker(pytest.mark.xdist_group(f"{item.module.__name__} {group}"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Cases that are deselected are not decoded beside the others."""
    for item in session.items:
        together = getattr(getattr(item, "module", None), "TOGETHER", None)
        if together is not None and hasattr(item, "callspec") and "case" in item.callspec.params:
            together.chosen.add(item.callspec.params["case"]["id"])


@pytest.fixture(scope="session")
def goldens() -> Path:
    return goldens_dir()
