"""What a call goes through that asks for nothing beside a text, and how many calls that takes."""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
UNASKED = (
    "dllm/structured/", "dllm/engine/maps.py", "dllm/engine/graphs.py", "dllm/engine/prefixes.py",
    "dllm/runtime/streamers.py", "dllm/runtime/events.py", "dllm/runtime/trace.py",
    "dllm/request/stopping.py", "dllm/request/holes.py", "dllm/drafting/",
)  # fmt: skip


SCRIPT = """
import json, house
seen = house.calls()
files = {phase: sorted(names) for phase, names in seen.files.items()}
print(json.dumps([seen.count, files, seen.entered["step"], seen.names["statistics"]]))
"""


def test_a_plain_call_passes_no_room_it_does_not_need() -> None:
    """In a process of its own: what other tests leave behind would be counted, too."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    count, seen, steps, names = json.loads(done.stdout.splitlines()[-1])
    files = {phase: len(names) for phase, names in seen.items()}
    assert not [f for names in seen.values() for f in names if f.startswith(UNASKED)]
    per_step = {name: count[name] / steps for name in ("step", "statistics", "network")}
    assert count["preparation"] <= 160 and files["preparation"] <= 20
    assert per_step["step"] <= 140 and files["step"] <= 18
    tiled = "torch.py:_packed" in names  # a packed head is walked tile by tile
    assert per_step["statistics"] <= (32 if tiled else 15)
    assert per_step["network"] <= 20 * 5  # layers of nano
    assert count["result"] <= 30
