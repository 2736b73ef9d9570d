"""A third party's package adds a sampler through an entry point."""

import importlib
import sys
from pathlib import Path

import pytest

import dllm
from dllm.cache import CACHES
from dllm.samplers import SAMPLERS, Selector, available, register

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


BROKEN = """
[dllm.caches]
stale = no_such_module:Cache
not_a_class = toy_plugin:VALUE
raises = toy_raises:Cache
none = toy_plugin:Other
whole_again = toy_plugin:Mine
other_name = toy_plugin:Mine
no_cache = toy_plugin:Loose
"""
CACHES_MODULE = '''
from dllm.cache import Cache, Plan

VALUE = 3


class Other(Cache):
    """Takes a name that exists."""


class Loose:
    """Inherits from nothing."""


class Mine(Cache):
    """Computes everything."""

    every: int = 4

    def plan(self, canvas, slots):
        return Plan(compute=canvas.live())
'''


def test_broken_entry_points_are_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is tried once, whatever becomes of the others."""
    (tmp_path / "toy_plugin.py").write_text(CACHES_MODULE)
    raises = "raise OSError('no\\nlibrary')"
    counter = f"import sys; sys.toy_tries = getattr(sys, 'toy_tries', 0) + 1; {raises}"
    (tmp_path / "toy_raises.py").write_text(counter)
    facts = tmp_path / "toy_plugin-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    monkeypatch.setattr(CACHES, "_plugins_loaded", False)
    try:
        with pytest.warns(RuntimeWarning) as caught:
            names = list(CACHES)
        messages = [str(warning.message) for warning in caught]
        assert "whole_again" in names and "dual" in names and "stale" not in names
        for name in ("stale", "not_a_class", "raises", "none", "other_name", "no_cache"):
            (message,) = [text for text in messages if text.startswith(f"cache {name!r}")]
            assert "of package toy-plugin is left out" in message and "\n" not in message
        assert dllm.cache.compose("whole_again(every=2)").every == 2  # type: ignore[attr-defined]
        assert "whole_again" in [info.name for info in dllm.cache.available()]
        with pytest.raises(dllm.UnknownNameError, match="dual"):  # no second try, no second warning
            dllm.cache.compose("daul")
        assert sys.toy_tries == 1  # type: ignore[attr-defined]
    finally:
        CACHES._entries.pop("whole_again", None)
        sys.modules.pop("toy_plugin", None)


def test_a_name_of_the_library_is_not_taken() -> None:
    with pytest.raises(dllm.ConfigError, match="'threshold' exists already"):
        register("threshold")(type("Threshold", (Selector,), {"__module__": "__main__"}))
    with pytest.raises(dllm.ConfigError, match="no subclass of Part"):
        register("loose")(type("Loose", (), {}))
