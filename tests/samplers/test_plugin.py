"""A third party's package adds a sampler through an entry point."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import dllm
from dllm.samplers import SAMPLERS, available

MODULE = '''
from dataclasses import dataclass

import numpy as np

from dllm.samplers import Selector


@dataclass(frozen=True)
class EveryThird(Selector):
    """Commit every third undecided position."""

    def select(self, view):
        return np.arange(len(view.positions)) % 3 == 0
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution ``toy-plugin`` with an entry point in ``dllm.samplers``."""
    (tmp_path / "toy_plugin.py").write_text(MODULE)
    facts = tmp_path / "toy_plugin-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[dllm.samplers]\nevery_third = toy_plugin:EveryThird\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setattr(SAMPLERS, "_plugins_loaded", False)
    yield
    SAMPLERS._entries.pop("every_third", None)
    sys.modules.pop("toy_plugin", None)


@pytest.mark.usefixtures("plugin")
def test_an_installed_package_adds_a_sampler() -> None:
    out = dllm.generate("nano", "Copy: Emma, Jack.", sampler="every_third", max_new_tokens=9)
    assert len(out.sequences) == out.prompt_length + 9 or out.finish_reason == "stop"
    listed = {info.name: info for info in available()}["every_third"]
    assert (listed.role, listed.summary) == ("selector", "Commit every third undecided position.")
