"""A server under mixed requests for a long time: answers, memory, CPU time, what is left.

    python benchmarks/soak.py                              # an hour, two requests per second
    python benchmarks/soak.py --model nano-ar --seconds 180

Requests arrive as a Poisson process: chats whole and streamed, with drafts of the canvas, several
answers, shared prefixes, structures, tools, texts before a suffix, gaps, likelihoods, lookups that
draft; a fifth of them leave, come too late or are malformed.  In the server a forward pass in
`FAULTS` is out of memory.  Answers are compared with those that the library gives to each request
alone.  The server is a process of its own, looked at from outside (Linux).  Exit code 1 when an
answer differs, memory or CPU time per request grew, or anything is left over in the end.
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

import dllm
from dllm.serve.batch import Line, answer
from dllm.serve.bodies import ScoreBody
from dllm.serve.service import Service
from dllm.serve.settings import Settings

WINDOWS = 20  # that a run is divided into
WARM = 0.25  # share of a run in which pools and allocators still fill
GROWTH = 1.02  # of resident memory, from the first window after that to the last ones
SLOWER = 1.25  # of CPU time per request, likewise
FAULTS = 200
POOL = 300  # requests that are drawn from
TICKS = os.sysconf("SC_CLK_TCK")
CHAT, TEXT, INFILL, SCORE = "/v1/chat/completions", "/v1/completions", "/v1/infill", "/v1/score"
OUT_OF_MEMORY = "out_of_memory"
SYSTEM = "Count in steps."
SETTINGS: dict[str, dict[str, Any]] = {
    "nano": {"caches": ("none", "dual"), "max_batch_size": 8},
    "nano-ar": {"drafters": ("prompt_lookup", "suffix"), "max_batch_size": 8},
}
NUMBER = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"],
          "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "note", "parameters": NUMBER}}


class Request(NamedTuple):
    """What is asked, where, and how."""

    kind: str
    path: str
    body: dict[str, Any]


def request(rng: random.Random, causal: bool = False) -> Request:
    """One whose answer is compared."""
    a, b = rng.randrange(10, 80), rng.randrange(10, 80)
    asked = {"role": "user", "content": f"Compute {a} + {b}."}
    chat: dict[str, Any] = {
        "messages": [asked], "max_tokens": 48, "temperature": rng.choice([0.0, 0.7]),
        "seed": rng.randrange(1000),
    }  # fmt: skip
    if not causal:
        chat |= {"sampler": rng.choice(["threshold", "localleap", "llada(steps=12)", "eb"]),
                 "cache": rng.choice(["none", "dual"]), "block_length": 16}  # fmt: skip
    before = {"role": "system", "content": SYSTEM}
    gap = {"prompt": f"Tom has {a} apples", "suffix": f"{b} apples.", "max_tokens": 8}
    score = {"prompt": f"{a}", "continuation": f"{b}", "samples": 4, "seed": 1}
    known = [
        Request("whole", CHAT, chat),
        Request("stream", CHAT, chat | {"stream": True, "stream_options": {"include_usage": True}}),
        Request("several", CHAT, chat | {"n": 3}),
        Request("structure", CHAT, chat | {"response_format": {
            "type": "json_schema", "json_schema": {"name": "sum", "schema": NUMBER}}}),
        Request("regex", CHAT, chat | {"structured_outputs": {"regex": f"({a}|{b})[0-9]{{1,2}}"}}),
    ]  # fmt: skip
    if not causal:  # in the context of nano-ar there is no room for some of them
        drafts = {"stream": True, "stream_options": {"include_drafts": "text"}}
        known += [
            Request("drafts", CHAT, chat | drafts), Request("suffix", TEXT, gap),
            Request("gaps", INFILL, {"text": f"{a} + {b} =[[2]], not[[1]]."}),
            Request("score", SCORE, score),
            Request("prefix", CHAT, chat | {"messages": [before, asked]}),
            Request("tools", CHAT, chat | {"tools": [TOOL], "tool_choice": "required"}),
        ]  # fmt: skip
    return rng.choice(known)


def spoilt(rng: random.Random, causal: bool) -> Request:
    """One that leaves, comes too late, or is malformed."""
    chat = {"messages": [{"role": "user", "content": "Compute 12 + 30."}], "max_tokens": 48}
    return rng.choice([
        Request("leaves", CHAT, chat | {"stream": rng.random() < 0.7}),
        Request("late", CHAT, chat | {"deadline": 0.001}),
        Request("malformed", CHAT, rng.choice([{}, chat | {"tools": [{}]}, chat | {"n": -1}])),
    ])  # fmt: skip


def essence(path: str, body: dict[str, Any]) -> Any:
    """What of an answer does not depend on when it was given."""
    if path == SCORE:
        return [[one["logprob"], one["tokens"]] for one in body["data"]]
    found = []
    for choice in sorted(body["choices"], key=lambda choice: choice["index"]):
        said = choice.get("message", {})
        calls = [[call["function"]["name"], call["function"]["arguments"]]
                 for call in said.get("tool_calls") or ()]  # fmt: skip
        text = said.get("content") if said else choice["text"]
        found.append([text or "", calls, choice["finish_reason"]])
    return found


def joined(text: str) -> dict[str, Any]:
    """The body of an answer that came as a stream."""
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    if failed := [event for event in events if "error" in event]:
        return failed[0]
    texts, reasons = dict[int, str](), dict[int, str]()
    for event in events:
        for choice in event.get("choices", ()):
            at = choice["index"]
            texts[at] = texts.get(at, "") + (choice["delta"].get("content") or "")
            reasons[at] = choice["finish_reason"] or reasons.get(at, "")
    return {"choices": [
        {"index": at, "message": {"content": texts[at]}, "finish_reason": reasons[at]}
        for at in texts
    ]}  # fmt: skip


class Library:
    """Answers of ``model`` to requests that are alone."""

    def __init__(self, model: Any, **settings: Any) -> None:
        self.model = dllm.load(model) if isinstance(model, str) else model
        self.service = Service(self.model, Settings(**settings))
        self.known: dict[str, Any] = {}
        self.one = asyncio.Lock()

    async def answer(self, asked: Request) -> Any:
        key = json.dumps(asked)
        async with self.one:
            if key not in self.known:
                self.known[key] = await self._answer(asked)
        return self.known[key]

    async def _answer(self, asked: Request) -> Any:
        kind, path, sent = asked
        body = {k: v for k, v in sent.items() if k not in ("stream", "stream_options")}
        if path == SCORE:
            asks = ScoreBody.read(body)
            given = asks.continuation
            texts = [given] if isinstance(given, str) else given
            scores = await self.service.likelihoods.score(asks.question or "", texts, asks.scoring)
            return [[one.logprob, one.tokens] for one in scores]
        if kind in ("whole", "stream", "drafts", "prefix") and not self.service.verifying:
            how = {k: v for k, v in body.items() if k not in ("messages", "max_tokens")}
            work = partial(dllm.generate, self.model, body["messages"],
                           max_new_tokens=body["max_tokens"], **how)  # fmt: skip
            result = await asyncio.to_thread(work)
            return [[result.text, [], result.finish_reason]]
        entry = await answer(self.service, Line("alone", path, body, ""))
        return essence(path, entry["response"]["body"])


async def one(
    client: httpx.AsyncClient, url: str, asked: Request, ends: Counter[str],
    library: Library | None, rng: random.Random,
) -> None:  # fmt: skip
    """Send a request; ``ends`` counts what became of it."""
    kind, path, body = asked
    try:
        if kind == "leaves":
            async with asyncio.timeout(rng.uniform(0.0, 0.2)):
                await client.post(url + path, json=body)
            ends["left too late"] += 1
            return
        found = await client.post(url + path, json=body)
    except TimeoutError:
        ends["left"] += 1
        return
    status = found.status_code
    if kind in ("late", "malformed"):
        right = status in {"late": (504, 200), "malformed": (400,)}[kind]
        ends[kind if right else f"{kind}: {status}"] += 1
        return
    got = joined(found.text) if body.get("stream") and status == 200 else found.json()
    if "error" in got:
        code = got["error"]["code"]
        ends["out of memory" if code == OUT_OF_MEMORY else f"{kind}: {status} {code}"] += 1
        return
    ends[kind] += 1
    if library is not None:
        ends["compared"] += 1
        if (wanted := await library.answer(asked)) != (shown := essence(path, got)):
            print(f"differs: {asked}\n  {shown}\n  {wanted}", file=sys.stderr)
            ends[f"{kind}: differs"] += 1


class Watch:
    """A process as its kernel counts it."""

    def __init__(self, pid: int) -> None:
        self.folder = Path(f"/proc/{pid}")

    def seconds(self) -> float:
        """CPU time so far."""
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
    url: str, pid: int, library: Library, seconds: float, rate: float, seed: int = 1,
    warm: int = 40,
) -> dict[str, Any]:  # fmt: skip
    """Ask the server at ``url``, process ``pid``, for ``seconds``, after ``warm`` requests at once;
    what was seen."""
    rng, ends, watch = random.Random(seed), Counter[str](), Watch(pid)
    causal = library.service.verifying is not None
    pool = [request(rng, causal) for _ in range(POOL)]

    async def ask(ends: Counter[str], library: Library | None) -> None:
        own = random.Random(rng.random())
        asked = spoilt(own, causal) if own.random() < 0.2 else own.choice(pool)
        await one(client, url, asked, ends, library, own)

    windows: list[dict[str, float]] = []
    limits = httpx.Limits(max_connections=None, keepalive_expiry=5)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        await asyncio.gather(*(ask(Counter(), None) for _ in range(warm)))
        began = time.monotonic()
        working = set[asyncio.Task[None]]()
        cpu, count, at = watch.seconds(), 0, 1
        while time.monotonic() < began + seconds or working:
            if time.monotonic() < began + seconds:
                task = asyncio.ensure_future(ask(ends, library))
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
        "seconds": seconds, "rate": rate, "requests": sum(ends.values()) - ends["compared"],
        "ends": dict(ends), "windows": windows, "left": left | watch.look(),
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
        wrong.append(f"CPU time per request grew {grown('cpu_ms_per_request'):.2f} times")
    left = seen["left"]
    if left["running"] or left["waiting"] or left["cache_positions_used_ratio"]:
        wrong.append(f"left over: {left}")
    for name in ("threads", "files"):
        if left[name] > max(window[name] for window in windows):
            wrong.append(f"{name} left over: {left[name]}")
    return wrong


def serve_with_faults(name: str) -> None:
    """The server: one forward pass in `FAULTS` is out of memory."""
    import torch

    from dllm.serve.run import run

    model, rng = dllm.load(name), random.Random(7)

    def fail(*_: Any) -> None:
        if rng.randrange(FAULTS) == 0:
            raise torch.OutOfMemoryError("injected")

    model.backbone.register_forward_pre_hook(fail)
    service = Service(model, Settings(**SETTINGS[name]))
    run(service, "127.0.0.1", 0, lambda url: print(url, flush=True))


@contextmanager
def server(name: str = "nano") -> Iterator[tuple[str, int]]:
    """The address and the process of a server of the model ``name``."""
    line = [sys.executable, __file__, "--server", "--model", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.communicate(timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=SETTINGS, default="nano")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--rate", type=float, default=2, help="requests per second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.server:
        serve_with_faults(given.model)
        return
    from harness import RESULTS, write  # isort: skip

    library = Library(given.model, **SETTINGS[given.model])
    with server(given.model) as (url, pid):
        seen = asyncio.run(soak(url, pid, library, given.seconds, given.rate, given.seed))
    library.service.close()
    wrong = complaints(seen)
    print(json.dumps(seen["ends"]), json.dumps(seen["left"]), *wrong, sep="\n")
    write(given.output or RESULTS / f"soak-{given.model}.json", seen | {"complaints": wrong})
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
