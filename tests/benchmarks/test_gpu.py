"""The roofline gives known floors; the GPU benchmark runs through at tiny sizes, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def roofline() -> Any:
    spec = importlib.util.spec_from_file_location("roofline", FOLDER / "roofline.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["roofline"] = importlib.util.module_from_spec(spec)  # dataclasses look
    spec.loader.exec_module(module)
    return module


# Milliseconds on one H200 (800 TFLOP/s, 4.8 TB/s), by hand: positions, keys per row, scored, rows
FLOORS = {
    "LLaDA-8B": [
        (768, 768, 768, 1, 14.78), (768, 768, 256, 1, 14.12), (768, 768, 32, 1, 14.00),
        (256, 768, 32, 1, 4.81), (32, 768, 32, 1, 3.21), (64, 768, 64, 1, 3.21),
        (16, 576, 16, 1, 3.19), (128, 768, 128, 1, 3.21),
        (128, 768, 128, 4, 3.46), (256, 768, 256, 8, 5.47), (1024, 768, 1024, 32, 21.9),
    ],
    "Dream-7B": [
        (768, 768, 768, 1, 13.87), (768, 768, 256, 1, 13.17), (768, 768, 32, 1, 13.05),
        (256, 768, 32, 1, 4.50), (32, 768, 32, 1, 2.96), (64, 768, 64, 1, 2.97),
        (128, 768, 128, 4, 3.00), (256, 768, 256, 8, 4.62), (1024, 768, 1024, 32, 18.5),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", FLOORS)
def test_floors(roofline: Any, name: str) -> None:
    shape, peak = roofline.SHAPES[name], roofline.Peak()
    for *case, expected in FLOORS[name]:
        digits = 2 if expected < 15 else 1
        assert round(1e3 * shape.floor(*case, peak), digits) == pytest.approx(
            expected, abs=0.011 if digits == 2 else 0.06
        ), case


def test_a_head_is_bound_by_its_weight_until_167_rows(roofline: Any) -> None:
    shape, peak = roofline.SHAPES["LLaDA-8B"], roofline.Peak()
    assert 1e3 * shape.head_floor(32, peak) == pytest.approx(0.216, abs=1e-3)
    assert shape.head_floor(32, peak) == shape.head_floor(166, peak) < shape.head_floor(168, peak)
    assert 1e3 * shape.head_floor(768, peak) == pytest.approx(0.995, abs=1e-3)


@pytest.mark.slow
def test_every_part_runs(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    output = tmp_path / "gpu.json"
    command = [sys.executable, str(FOLDER / "gpu.py"), "--dry", "--output", str(output)]
    for parts in (["statistics", "rotation"], ["steps", "generations"]):
        done = subprocess.run([*command, "--parts", *parts], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(output.read_text())  # the second command has added to the first
    assert set(result["dry"]) == {"statistics", "rotation", "steps", "generations"}
    assert result["machine"]["cores"] and result["peak"]["tflops"] == 800.0
    cases = [case for part in result["dry"].values() for case in part]
    assert len(cases) > 20 and not any("error" in case for case in cases)
    assert result["dry"]["statistics"][0]["same_argmax"] == 1.0
