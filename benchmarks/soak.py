"""A server under mixed requests for a long time: memory, processor time per request, what is left.

    python benchmarks/soak.py                              # an hour, two requests per second
    python benchmarks/soak.py --seconds 180 --rate 10

Requests arrive as a Poisson process: chats streamed, with drafts and whole, several answers, texts
before a suffix, holes, likelihoods; a fifth of them leave, come too late or are malformed.  The
server is a process of its own, looked at from outside (Linux).  Exit code 1 when memory or
processor time per request grew, or anything is left over in the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

WINDOWS = 20  # that a run is divided into
WARM = 0.25  # share of a run in which pools and allocators still fill
GROWTH = 1.02  # of resident memory, from the first window after that to the last ones
SLOWER = 1.25  # of processor time per request, likewise
TICKS = os.sysconf("SC_CLK_TCK")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    """What is to become of a request, its path, its body."""
    a, b = rng.randrange(10, 80), rng.randrange(10, 80)
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Compute {a} + {b}."}], "max_tokens": 48,
        "sampler": rng.choice(["threshold", "localleap", "llada(steps=12)", "eb"]),
        "cache": rng.choice(["none", "dual"]), "block_length": 16,
        "temperature": rng.choice([0.0, 0.7]),
    }  # fmt: skip
    streamed = chat | {"stream": True, "stream_options": {"include_usage": True}}
    kind = rng.choices(
        ["whole", "stream", "drafts", "several", "suffix", "holes", "score", "leaves", "late",
         "malformed"],
        [20, 25, 10, 5, 8, 6, 6, 8, 6, 6],
    )[0]  # fmt: skip
    hole = {"prompt": f"Tom has {a} apples", "suffix": f"{b} apples.", "max_tokens": 8}
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "whole": (CHAT, chat),
        "stream": (CHAT, streamed),
        "drafts": (CHAT, streamed | {"stream_options": {"include_drafts": "text"}}),
        "several": (CHAT, chat | {"n": 3, "logprobs": True, "top_logprobs": 2}),
        "suffix": (TEXT, hole),
        "holes": ("/v1/infill", {"text": f"{a} + {b} =[[2]], not[[1]]."}),
        "score": ("/v1/score", {"prompt": f"{a}", "continuation": f"{b}", "samples": 4}),
        "leaves": (CHAT, streamed if rng.random() < 0.7 else chat),
        "late": (CHAT, chat | {"deadline": 0.001}),
        "malformed": (CHAT, rng.choice([{}, chat | {"tools": [{}]}, chat | {"sampler": "none"}])),
    }
    return kind, *asked[kind]


async def one(client: httpx.AsyncClient, url: str, rng: random.Random, ends: Counter[str]) -> None:
    """Send a request; ``ends`` counts what became of it."""
    kind, path, body = request(rng)
    try:
        if kind == "leaves":
            async with asyncio.timeout(rng.uniform(0.0, 0.2)):
                await client.post(url + path, json=body)
        answer = await client.post(url + path, json=body) if kind != "leaves" else None
    except TimeoutError:
        ends["left"] += 1
        return
    status = 200 if answer is None else answer.status_code
    right = {"late": (504, 200), "malformed": (400,)}.get(kind, (200,))
    if answer is not None and status == 200 and body.get("stream"):
        status = 200 if answer.text.endswith("data: [DONE]\n\n") else 500
    ends[kind if status in right else f"{kind}: {status}"] += 1


class Watch:
    """A process as its kernel counts it."""

    def __init__(self, pid: int) -> None:
        self.folder = Path(f"/proc/{pid}")

    def seconds(self) -> float:
        """Processor time so far."""
        fields = (self.folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def look(self) -> dict[str, float]:
        status = dict(
            line.split(":\t", 1) for line in (self.folder / "status").read_text().splitlines()
            if ":\t" in line
        )  # fmt: skip
        return {
            "memory_mib": int(status["VmRSS"].split()[0]) / 1024,
            "threads": int(status["Threads"]),
            "files": len(list((self.folder / "fd").iterdir())),
        }


async def soak(
    url: str, pid: int, seconds: float, rate: float, seed: int = 1, warm: int = 40
) -> dict[str, Any]:
    """Ask the server at ``url``, process ``pid``, for ``seconds``, after ``warm`` requests at once;
    what was seen."""
    rng, ends, watch = random.Random(seed), Counter[str](), Watch(pid)
    windows: list[dict[str, float]] = []
    limits = httpx.Limits(max_connections=None, keepalive_expiry=5)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        await asyncio.gather(*(one(client, url, rng, Counter()) for _ in range(warm)))
        began = time.monotonic()
        working = set[asyncio.Task[None]]()
        cpu, count, at = watch.seconds(), 0, 1
        while time.monotonic() < began + seconds or working:
            if time.monotonic() < began + seconds:
                task = asyncio.ensure_future(one(client, url, random.Random(rng.random()), ends))
                working.add(task)
                task.add_done_callback(working.discard)
                count += 1
                await asyncio.sleep(rng.expovariate(rate))
            else:
                await asyncio.wait(working)
            if time.monotonic() >= began + seconds * at / WINDOWS:
                at += 1
                now = watch.seconds()
                spent = 1000 * (now - cpu) / max(1, count)
                windows.append({"requests": count, "cpu_ms_per_request": round(spent, 2),
                                **watch.look()})  # fmt: skip
                cpu, count = now, 0
                print(f"{time.monotonic() - began:6.0f} s  {windows[-1]}", flush=True)
    left = await at_rest(url)
    return {
        "seconds": seconds, "rate": rate, "requests": sum(ends.values()), "ends": dict(ends),
        "windows": windows, "left": left | watch.look(),
    }  # fmt: skip


async def at_rest(url: str) -> dict[str, Any]:
    """The state of the server once it has had time to come to rest."""
    async with httpx.AsyncClient(timeout=60) as client:
        for _ in range(100):
            state = (await client.get(f"{url}/ready")).json()
            if not (state["running"] or state["waiting"] or state["cache_positions_used_ratio"]):
                break
            await asyncio.sleep(0.1)
    await asyncio.sleep(1)  # connections close
    return {name: state[name] for name in ("status", "running", "waiting",
                                           "cache_positions_used_ratio")}  # fmt: skip


def complaints(seen: dict[str, Any]) -> list[str]:
    """What is wrong with a run."""
    wrong = [f"{n} × {end}" for end, n in seen["ends"].items() if ":" in end]
    windows = seen["windows"][int(WARM * len(seen["windows"])) :]
    third = max(1, len(windows) // 3)

    def grown(name: str) -> float:
        values = [window[name] for window in windows]
        return float(np.median(values[-third:]) / np.median(values[:third]))

    if grown("memory_mib") > GROWTH:
        wrong.append(f"memory grew {grown('memory_mib'):.3f} times")
    if grown("cpu_ms_per_request") > SLOWER:
        wrong.append(f"processor time per request grew {grown('cpu_ms_per_request'):.2f} times")
    left = seen["left"]
    if left["running"] or left["waiting"] or left["cache_positions_used_ratio"]:
        wrong.append(f"left over: {left}")
    for name in ("threads", "files"):
        if left[name] > max(window[name] for window in windows):
            wrong.append(f"{name} left over: {left[name]}")
    return wrong


@contextmanager
def server() -> Iterator[tuple[str, int]]:
    """The address and the process of ``dllm serve nano`` with two caches."""
    command = [sys.executable, "-m", "dllm", "serve", "nano", "--port", "0", "-c", "none", "-c",
               "dual", "--max-batch-size", "8", "--max-waiting", "64"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        yield line.split(" at ", 1)[1].split("/v1")[0], process.pid
    finally:
        process.terminate()
        _, log = process.communicate(timeout=120)
        if log.strip():
            print(log, file=sys.stderr)


def main() -> None:
    from harness import RESULTS, write  # isort: skip

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--rate", type=float, default=2, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS / "soak.json")
    given = parser.parse_args()
    with server() as (url, pid):
        seen = asyncio.run(soak(url, pid, given.seconds, given.rate, given.seed))
    wrong = complaints(seen)
    print(json.dumps(seen["ends"]), json.dumps(seen["left"]), *wrong, sep="\n")
    write(given.output, seen | {"complaints": wrong})
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
