"""docs/fidelity.md is what the recorded runs and the tests that replay them say."""

import re
from pathlib import Path

import pytest

from .script import run_script

ROOT = Path(__file__).parents[2]


def test_the_page_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    run_script("fidelity.py", "--check", monkeypatch=monkeypatch)


def test_the_readme_claims_the_traces_that_the_page_counts() -> None:
    counted, claimed = (
        {int(n) for n in re.findall(r"(\d+) decoding traces", (ROOT / name).read_text("utf-8"))}
        for name in ("docs/fidelity.md", "README.md")
    )
    assert claimed == counted and len(counted) == 1
