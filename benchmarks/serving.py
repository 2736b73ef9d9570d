"""Latency against load: continuous batches, static batches, and one request after the other.

    python benchmarks/serving.py                     # nano: four modes at each rate
    python benchmarks/serving.py --model 135M --rates 0.7 1.5 3 --requests 24
    python benchmarks/serving.py engine              # the same without HTTP, see below
    python benchmarks/serving.py overhead            # HTTP, queue and events at one client, nano
    python benchmarks/pages.py                       # then: the tables of its page

The client is open: requests arrive as a Poisson process, whatever became of those before.  The
modes share the server, the engine and its cache:

- ``continuous``: requests enter at every step;
- ``static``: they enter when the engine is empty, those that are finished leave at once;
- ``equal``: static, and all answers of a batch get the length of its longest, as in loops over a
  rectangle of tokens, which is what published code does;
- ``serial``: one row.

Every rate visits the modes one right after the other, with the same arrivals and the same requests,
so that a busy minute of the machine hits all of them alike; compare modes, not seconds.  Rates are
multiples of what ``serial`` answers when it is never idle.  Whole canvases without a cache fill a
processor alone, so that batches cannot gain anything there: the cache is ``dual``.

``engine`` drives the scheduler itself, on a clock of processor time: a request arrives when the
engine has worked that long, and an idle engine skips to the next arrival.  What else the machine
does hardly matters then.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from harness import RESULTS, write  # isort: skip

MODES = ("continuous", "static", "equal", "serial")
ROWS = 16
CACHE, BLOCK = "dual", 16
LENGTHS = {"nano": (16, 32, 48, 96), "135M": (16, 32, 64)}
LIMITS = (5.0, 8.0, 12.0)  # of p90 or p99, times the mean latency of a request alone
SEEDS, MANY = 3, 1000  # seeds, and requests of all, from which on p99 says something
WATCHED = 4  # every fourth request asks for drafts, the price of which others need not pay


def load(name: str) -> Any:
    """The model that is served."""
    from harness import llada_135m

    import dllm

    return llada_135m() if name == "135M" else dllm.load(name)


def serve(mode: str, name: str) -> None:
    """A server in this process; prints its address."""
    import torch

    from dllm.serve.run import run
    from dllm.serve.service import Service
    from dllm.serve.settings import Settings

    torch.set_num_threads(1)
    rows = 1 if mode == "serial" else ROWS
    settings = Settings(caches=(CACHE,), max_batch_size=rows, max_waiting=100_000, page=False)
    service = Service(load(name), settings)
    if mode in ("static", "equal"):
        scheduler = service.sessions[CACHE]._scheduler
        scheduler._admit = partial(batch, scheduler, scheduler._admit, mode == "equal")
    run(service, "127.0.0.1", 0, lambda url: print(url, flush=True))


def batch(scheduler: Any, admit: Callable[[], Any], equal: bool) -> Any:
    """Let a batch in when the one before is finished; ``equal``: with answers of one length."""
    if scheduler.running:
        return []
    entering = list(islice(scheduler.waiting, ROWS))
    longest = max((request.size for request in entering), default=0)
    for request in entering if equal else ():
        *before, _, _, fixed, repetition = request.make.args
        request.make = partial(request.make.func, *before, longest, longest, fixed, repetition)
        request.positions += longest - request.size
        request.size = longest
    return admit()


@contextmanager
def server(mode: str, name: str) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, __file__, "serve", "--mode", mode, "--model", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def requests(name: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Requests whose answers differ in length: one token per step, the published baseline."""
    rng = random.Random(seed)
    made = []
    for i in range(count):
        length = rng.choice(LENGTHS[name])
        prompt = [rng.randrange(20, 200) for _ in range(rng.randint(8, 24))]
        made.append({
            "prompt": prompt, "max_tokens": length, "ignore_eos": True, "sampler": "llada",
            "block_length": BLOCK, "stream": True,
            "stream_options": {"include_drafts": i % WATCHED == 0, "include_usage": True},
        })  # fmt: skip
    return made


async def one(client: httpx.AsyncClient, url: str, request: dict[str, Any]) -> dict[str, float]:
    """Seconds to the first draft if drafts are asked for, to the first final text, to the end."""
    began, times = time.perf_counter(), {}
    async with client.stream("POST", f"{url}/v1/completions", json=request) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("dllm", {}).get("type") == "step":
                times.setdefault("first draft", time.perf_counter() - began)
            if any(choice["text"] for choice in event["choices"]):
                times.setdefault("first text", time.perf_counter() - began)
    times["end to end"] = time.perf_counter() - began
    return {"first text": times["end to end"], **times}


async def arrive(url: str, work: list[dict[str, Any]], rate: float, seed: int) -> Any:
    """Send ``work`` as a Poisson process of ``rate`` per second, whatever becomes of it."""
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=900, limits=limits) as client:
        tasks = []
        for request in work:
            tasks.append(asyncio.ensure_future(one(client, url, request)))
            await asyncio.sleep(rng.expovariate(rate))
        return await asyncio.gather(*tasks)


async def closed(url: str, work: list[dict[str, Any]]) -> list[dict[str, float]]:
    """One request after the other."""
    async with httpx.AsyncClient(timeout=900) as client:
        return [await one(client, url, request) for request in work]


def percentiles(runs: list[list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """p50 and p90 of every time, over the runs of all seeds; p99 where they are enough for it."""
    times = [t for run in runs for t in run]
    wanted = (50, 90, 99) if len(runs) >= SEEDS and len(times) >= MANY else (50, 90)
    result = {}
    for what in ("first draft", "first text", "end to end"):
        seconds = [t[what] for t in times if what in t]
        result[what] = {f"p{p}": round(float(np.percentile(seconds, p)), 4) for p in wanted}
    return result


def tail(points: list[dict[str, Any]]) -> str:
    """The highest percentile that was measured."""
    return "p99" if "p99" in points[0]["end to end"] else "p90"


def measure(name: str, multiples: list[float], count: int, seeds: int) -> dict[str, Any]:
    """Every mode at every rate."""
    import torch

    torch.set_num_threads(1)  # as in the servers: it is noted with the results
    points: list[dict[str, Any]] = []
    with ExitStack() as stack:
        urls = {mode: stack.enter_context(server(mode, name)) for mode in MODES}
        for url in urls.values():
            asyncio.run(closed(url, requests(name, 2, 99)))  # warm
        alone = asyncio.run(closed(urls["serial"], requests(name, 12, 98)))
        seconds = float(np.mean([t["end to end"] for t in alone]))
        for multiple in multiples:
            for mode in MODES:
                rate = multiple / seconds
                runs = [
                    asyncio.run(arrive(urls[mode], requests(name, count, seed), rate, seed))
                    for seed in range(int(1000 * multiple), int(1000 * multiple) + seeds)
                ]
                point = {"mode": mode, "load": multiple, "rate": rate, **percentiles(runs)}
                points.append(point)
                print(f"{mode:11} load {multiple:<5} {point['end to end']}", flush=True)
    return summary(name, count * seeds, points, seconds)


def summary(name: str, count: int, points: list[Any], seconds: float) -> dict[str, Any]:
    """What the points say: loads that are borne at equal p90, or p99."""
    return {
        "model": name, "cache": CACHE, "block": BLOCK, "rows": ROWS, "requests": count,
        "lengths": LENGTHS[name], "alone_seconds": seconds, "points": points,
        "tail": tail(points),
        "borne": [
            {"what": what, "limit": limit, "loads": borne(points, what, limit * seconds)}
            for what in ("end to end", "first text") for limit in LIMITS
        ],
    }  # fmt: skip


def on_the_clock(name: str, multiples: list[float], count: int, seeds: int) -> dict[str, Any]:
    """Every mode at every rate, without HTTP, in seconds of processor time."""
    import torch

    torch.set_num_threads(1)
    model = load(name)
    alone = drive(model, "serial", requests(name, 12, 98), [0.0] * 12)
    ends = [0.0, *(t["end to end"] for t in alone)]
    seconds = float(np.mean([after - before for before, after in pairwise(ends)]))
    points: list[dict[str, Any]] = []
    steps: dict[int, list[float]] = {}
    for multiple in multiples:
        runs: dict[str, list[list[dict[str, float]]]] = {mode: [] for mode in MODES}
        for seed in range(int(1000 * multiple), int(1000 * multiple) + seeds):
            rng = random.Random(seed)
            gaps = [rng.expovariate(multiple / seconds) for _ in range(count)]
            arrivals = np.cumsum([0.0, *gaps[1:]]).tolist()
            for mode in MODES:
                runs[mode].append(drive(model, mode, requests(name, count, seed), arrivals, steps))
        for mode in MODES:
            rate = {"mode": mode, "load": multiple, "rate": multiple / seconds}
            points.append(rate | percentiles(runs[mode]))
            print(f"{mode:11} load {multiple:<5} {points[-1]['end to end']}", flush=True)
    added = {"added_by_a_row": added_by_a_row(steps)}
    return summary(name, count * seeds, points, seconds) | added


def added_by_a_row(steps: dict[int, list[float]]) -> float:
    """What one more row adds to a step, in steps of a single row: a line through the medians."""
    rows = sorted(count for count, seconds in steps.items() if len(seconds) > 20)
    slope, fixed = np.polyfit(rows, [float(np.median(steps[count])) for count in rows], 1)
    return round(float(slope / (slope + fixed)), 3)


def drive(
    model: Any, mode: str, work: list[dict[str, Any]], arrivals: list[float],
    steps: dict[int, list[float]] | None = None,
) -> list[dict[str, float]]:  # fmt: skip
    """Seconds from each of ``arrivals``, on a clock that runs while the engine works, to the first
    draft, the first final text and the end.  ``steps`` gets the seconds of steps by their rows."""
    from dllm.cache import compose
    from dllm.engine import Engine
    from dllm.request.requests import recipe_for, requests_for
    from dllm.runtime.events import final_end
    from dllm.runtime.scheduler import Scheduler

    cache = compose(CACHE, model.family.name)
    rows = 1 if mode == "serial" else ROWS
    engine = Engine(model, cache, most=rows * model.facts.context_length, max_batch_size=rows)
    scheduler = Scheduler(engine)
    if mode in ("static", "equal"):
        scheduler._admit = partial(batch, scheduler, scheduler._admit, mode == "equal")
    made = []
    for one in work:
        length = one["max_tokens"]
        how = {"max_new_tokens": length, "min_new_tokens": length, "block_length": BLOCK}
        recipe = recipe_for(model, one["sampler"], None, how)
        made += requests_for(model, recipe, [one["prompt"]])
    arrived = dict(zip(made, arrivals, strict=True))
    times: dict[Any, dict[str, float]] = {request: {} for request in made}
    coming, clock = list(reversed(made)), 0.0
    while coming or scheduler.busy:
        if not scheduler.busy:
            clock = max(clock, arrived[coming[-1]])
        while coming and arrived[coming[-1]] <= clock:
            scheduler.add(coming.pop())
        began = time.process_time()
        progress = scheduler.advance()
        spent = time.process_time() - began
        clock += spent
        if steps is not None:
            steps.setdefault(len(progress), []).append(spent)
        for request, step in progress:
            if step is None:
                raise request.error
            mine, canvas = times[request], step.canvas
            seconds = clock - arrived[request]
            mine.setdefault("first draft", seconds)
            if final_end(canvas, canvas.window, request.recipe) > canvas.prompt_length:
                mine.setdefault("first text", seconds)
            if request.done:
                mine["end to end"] = seconds
    scheduler.close()
    return list(times.values())


def borne(points: list[dict[str, Any]], what: str, limit: float) -> dict[str, float | None]:
    """The largest load of each mode at which the `tail` of ``what`` stays below ``limit`` seconds.

    By linear interpolation between the loads that were measured; None where the lowest of them is
    too much already, the largest where all of them are borne."""
    result: dict[str, float | None] = {}
    for mode in MODES:
        curve = [(p["load"], p[what][tail(points)]) for p in points if p["mode"] == mode]
        most = curve[0][0] if curve[0][1] <= limit else None
        for (low, before), (high, after) in pairwise(curve):
            if before > limit:
                break
            most = high if after <= limit else low + (high - low) * (limit - before) / (
                after - before
            )  # fmt: skip
        result[mode] = most if most is None else round(most, 2)
    return result


def overhead(repeats: int, count: int = 200) -> dict[str, Any]:
    """Processor time of the server's process per request, less that of the same requests on a
    session in this process: ``repeats`` rounds of ``count`` requests of one step, in turns."""
    import psutil
    import torch

    import dllm

    torch.set_num_threads(1)
    once = "llada(steps=1)"
    asked = [f"What is {i} + {i * 7 % 10}?" for i in range(count)]
    body = {"max_tokens": BLOCK, "ignore_eos": True, "sampler": once, "block_length": BLOCK}
    how = {"max_new_tokens": BLOCK, "min_new_tokens": BLOCK, "block_length": BLOCK}
    bodies = [{"prompt": prompt, **body} for prompt in asked]
    found: dict[str, list[float]] = {"answer": [], "stream": []}
    alone = []
    session = dllm.Session("nano", cache=CACHE, sampler=once)
    with server("continuous", "nano") as url, session:
        process = next(c for c in psutil.Process().children() if "serve" in c.cmdline())
        for _ in range(repeats + 1):
            began = time.process_time()
            for prompt in asked:
                session.submit(prompt, **how).result()
            alone.append(1000 * (time.process_time() - began) / count)
            for kind, milliseconds in found.items():
                before = process.cpu_times()
                asyncio.run(closed(url, [{**body, "stream": kind == "stream"} for body in bodies]))
                after = process.cpu_times()
                spent = after.user + after.system - before.user - before.system
                milliseconds.append(1000 * spent / count - alone[-1])
    return {"count": count, "alone": round(float(np.median(alone[1:])), 3), "added": {
        kind: [round(each, 3) for each in values[1:]] for kind, values in found.items()
    }}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="load",
                        choices=["load", "engine", "overhead", "serve"])  # fmt: skip
    parser.add_argument("--model", default="nano", choices=list(LENGTHS))
    parser.add_argument("--mode", default="continuous", choices=MODES)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1, 1.5, 2, 2.5, 3, 4, 5])
    parser.add_argument("--requests", type=int, default=200, help="with every seed")
    parser.add_argument("--seeds", type=int, default=1, help="runs at each load")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, help="instead of the results of the repository")
    given = parser.parse_args()
    if given.what == "serve":
        serve(given.mode, given.model)
        return
    if given.what == "overhead":
        write(given.output or RESULTS / "serving_overhead.json", overhead(given.repeats))
        return
    suffix = "" if given.model == "nano" else f"_{given.model.lower()}"
    if given.what == "engine":
        suffix += "_engine"
    file = given.output or RESULTS / f"serving{suffix}.json"
    run = measure if given.what == "load" else on_the_clock
    write(file, run(given.model, given.rates, given.requests, given.seeds))


if __name__ == "__main__":
    main()
