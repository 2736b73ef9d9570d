"""docs/fidelity.md is what the recorded runs and the tests that replay them say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fidelity.py"


def test_the_page_is_current() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_readme_claims_the_traces_that_the_page_counts() -> None:
    counted, claimed = (
        {int(n) for n in re.findall(r"(\d+) decoding traces", (ROOT / name).read_text("utf-8"))}
        for name in ("docs/fidelity.md", "README.md")
    )
    assert claimed == counted and len(counted) == 1
