"""What a call goes through that asks for nothing beside a text, and how many calls that takes."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
UNASKED = (
    "dllm/structured/", "dllm/engine/maps.py", "dllm/engine/graphs.py", "dllm/engine/prefixes.py",
    "dllm/runtime/streamers.py", "dllm/runtime/events.py", "dllm/runtime/trace.py",
    "dllm/request/stopping.py", "dllm/request/holes.py", "dllm/drafting/",
)  # fmt: skip


def test_a_plain_call_passes_no_room_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "house", raising=False)
    import house

    seen = house.calls()
    files = {phase: len(names) for phase, names in seen.files.items()}
    assert not [f for names in seen.files.values() for f in names if f.startswith(UNASKED)]
    steps = seen.entered["step"]
    per_step = {name: seen.count[name] / steps for name in ("step", "statistics", "network")}
    assert seen.count["preparation"] <= 160 and files["preparation"] <= 20
    assert per_step["step"] <= 140 and files["step"] <= 18
    tiled = seen.names["statistics"]["torch.py:_packed"]  # a packed head is walked tile by tile
    assert per_step["statistics"] <= (32 if tiled else 15)
    assert per_step["network"] <= 20 * 5  # layers of nano
    assert seen.count["result"] <= 30
