"""Scripts of benchmarks/, run in this process: a new one would import everything again."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run_script(name: str, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``python benchmarks/name arguments``.  Raises `SystemExit` where the script does, unless
    with status 0."""
    script = BENCHMARKS / name
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
