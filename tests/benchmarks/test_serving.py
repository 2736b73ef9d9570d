"""That modes of the serving benchmark answer every request, on the clock of processor time."""

import sys
from pathlib import Path
from typing import Any

import pytest

import dllm

from ..thin import some

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("mode", some(["equal", "serial"], 1))
def test_every_request_is_answered(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "serving", raising=False)
    import serving

    work: list[dict[str, Any]] = [
        one | {"max_tokens": length}
        for one, length in zip(serving.requests("nano", 3, 0), (16, 32, 16), strict=True)
    ]
    steps: dict[int, list[float]] = {}
    times = serving.drive(dllm.load("nano"), mode, work, [0.0, 0.0, 1e9], steps)
    assert all(0 < t["first draft"] <= t["first text"] <= t["end to end"] for t in times)
    # One token per step; in `equal` the short answers are as long as the long one beside them.
    longest = {"equal": 32, "serial": 48}[mode]
    assert sum(map(len, steps.values())) == longest + 16
    assert max(steps) == (1 if mode == "serial" else 2)
