"""The example scripts run as they stand."""

import hashlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
NEEDS = {"evaluate": "lm_eval", "agent": "agents"}


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_it_runs(file: Path, tmp_path: Path) -> None:
    package = NEEDS.get(file.stem)
    if package is not None and find_spec(package) is None:
        pytest.skip(f"needs {package}")
    done = subprocess.run([sys.executable, file], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-2000:]


def test_the_drafter_has_the_checksums_of_its_card() -> None:
    folder = EXAMPLES[0].parent / "smollm2-drafter"
    sums = re.findall(r"^([0-9a-f]{64})  (\S+)$", (folder / "README.md").read_text("utf-8"), re.M)
    assert len(sums) == 2
    for digest, name in sums:
        if (folder / name).is_file():  # a checkout may leave the weights out
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
