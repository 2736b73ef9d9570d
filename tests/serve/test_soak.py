"""A server under mixed requests, compressed: `benchmarks/soak.py` for an hour, here for less."""

import asyncio
import importlib.util
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

import dllm

from .conftest import Start, idle, until
from .leftovers import tasks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_nothing_is_left_after_a_second(
    script: Any, start: Start, tiny: dllm.DiffusionModel
) -> None:
    """Here in one process with its client: what a request costs is not looked at."""
    how: dict[str, Any] = {"caches": ("none", "dual"), "max_batch_size": 4}
    served = start(tiny, **how)
    library = script.Library(tiny, **how)
    seen = asyncio.run(script.soak(served.url, os.getpid(), library, seconds=1, rate=18, warm=3))
    library.service.close()
    assert not [end for end in seen["ends"] if ":" in end], seen["ends"]
    assert seen["requests"] > 9 and seen["ends"]["compared"] > 5 and seen["left"]["running"] == 0
    until(lambda: idle(served))
    until(lambda: tasks(served) <= 3)
    until(lambda: not served.server.server_state.connections)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["nano", "nano-ar"])
def test_three_minutes(script: Any, model: str) -> None:
    """The real process, with forwards out of memory: answers equal, memory and CPU time per request
    flat, nothing left over."""
    library = script.Library(model, **script.SETTINGS[model])
    with script.server(model) as (url, pid):
        seen = asyncio.run(script.soak(url, pid, library, seconds=180, rate=5))
    library.service.close()
    assert not script.complaints(seen), seen
    assert seen["ends"]["compared"] > 100


def test_a_wrong_answer_is_counted(script: Any) -> None:
    """And one that came as a stream is what it is as a whole."""
    events = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
              for text in ("12", " + 3")]  # fmt: skip
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    assert script.essence(script.CHAT, script.joined(stream)) == [["12 + 3", [], "stop"]]

    class Other:
        async def answer(self, asked: Any) -> Any:
            return [["12 + 4", [], "stop"]]

    def reply(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=stream)

    async def ask() -> Counter[str]:
        ends = Counter[str]()
        asked = script.Request("stream", script.CHAT, {"stream": True})
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply)) as client:
            await script.one(client, "http://x", asked, ends, Other(), random.Random(1))
        return ends

    ends = asyncio.run(ask())
    assert ends["compared"] == 1 and ends["stream: differs"] == 1


def test_what_is_complained_of(script: Any) -> None:
    """Growth of memory and of time, wrong ends, and what is left over."""
    window = {"requests": 10, "cpu_ms_per_request": 20.0, "memory_mib": 100, "threads": 7,
              "files": 9}  # fmt: skip
    left = {"running": 0, "waiting": 0, "cache_positions_used_ratio": 0, "threads": 7, "files": 9}
    seen: dict[str, Any] = {"ends": {"whole": 5}, "windows": [dict(window) for _ in range(20)],
                            "left": left}  # fmt: skip
    assert script.complaints(seen) == []
    for i, one in enumerate(seen["windows"]):
        one["memory_mib"] += i
        one["cpu_ms_per_request"] += 2 * i
    seen["ends"]["whole: 500"] = 2
    seen["left"] = left | {"running": 1, "files": 12}
    found = " / ".join(script.complaints(seen))
    for wanted in ("2 × whole: 500", "memory grew", "CPU time", "left over", "files left"):
        assert wanted in found
