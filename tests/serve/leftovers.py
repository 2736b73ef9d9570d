"""What a server holds at rest, and that it holds no more after a fault."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dllm

from .conftest import CHAT, PATIENCE, Served, idle, until

SLOWLY = {"sampler": "fixed(n=1)", "max_tokens": 64, "block_length": 64, "ignore_eos": True}


def body(text: str = "one two", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **SLOWLY, **more}


def tasks(served: Served) -> int:
    """Tasks in the server's event loop, without the one that counts."""

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    loop = served.server.servers[0].get_loop()
    return asyncio.run_coroutine_threadsafe(count(), loop).result(PATIENCE)


@dataclass(frozen=True)
class Resources:
    """What this process holds: threads and open files."""

    threads: int
    files: int

    @classmethod
    def now(cls) -> Resources:
        listed = Path("/proc/self/fd")
        files = len(list(listed.iterdir())) if listed.exists() else 0
        return cls(threading.active_count(), files)


def at_rest(served: Served) -> Resources:
    """Once everything that the server needs has run: its threads start when they are needed."""
    served.post(CHAT, body(max_tokens=4, block_length=4))
    served.post("/v1/score", {"prompt": "one", "continuation": "two", "samples": 1})
    until(lambda: idle(served))
    until(lambda: not served.server.server_state.connections)
    return Resources.now()


def nothing_left(served: Served, model: dllm.DiffusionModel, before: Resources) -> None:
    """No row, slot, task, connection, thread or file is left over, and the next request works."""
    until(lambda: idle(served))
    until(lambda: tasks(served) <= 3)  # uvicorn's own loop and the lifespan
    until(lambda: not served.server.server_state.connections)
    until(lambda: Resources.now().files <= before.files)
    assert threading.active_count() <= before.threads
    for session in served.service.sessions.values():
        engine = session._scheduler.engine
        assert not engine.live and not session._handles
    answer = served.post(CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8})
    assert answer.status_code == 200
    text = dllm.generate(model, "hi", max_new_tokens=8).text
    assert answer.json()["choices"][0]["message"]["content"] == text
