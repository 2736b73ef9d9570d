"""Latency against load: continuous batches, static batches, and one request after the other.

    python benchmarks/serving.py                     # nano: three modes at each rate, and the plot
    python benchmarks/serving.py --model 135M --rates 0.5 1 --requests 12
    python benchmarks/serving.py overhead            # HTTP and queue at one client, 135M shape

The client is open: requests arrive as a Poisson process, whatever became of those before.  The
modes share the server and the engine: ``static`` lets requests in only when the engine is empty,
``serial`` has one row.  Every rate visits the modes one right after the other, with the same
arrivals and the same requests, so that a busy minute of the machine hits all of them alike; compare
modes, not seconds.  Rates are multiples of what ``serial`` answers when it is never idle.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from report import RESULTS, write  # isort: skip

MODES = ("continuous", "static", "serial")
ROWS = 16
LENGTHS = {"nano": (8, 16, 32, 64, 96), "135M": (16, 32, 64)}
PATIENCE = 5.0  # times the latency of a request alone: the load that p99 bears


def load(name: str) -> Any:
    """The model that is served."""
    from shapes import llada_135m

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
    service = Service(load(name), Settings(max_rows=rows, max_waiting=100_000, page=False))
    if mode == "static":
        scheduler = service.sessions["none"]._scheduler
        admit = scheduler._admit
        scheduler._admit = lambda: [] if scheduler.running else admit()
    run(service, "127.0.0.1", 0, lambda url: print(url, flush=True))


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
    for _ in range(count):
        length = rng.choice(LENGTHS[name])
        prompt = [rng.randrange(20, 200) for _ in range(rng.randint(8, 24))]
        made.append({
            "prompt": prompt, "max_tokens": length, "ignore_eos": True, "sampler": "llada",
            "block_length": length, "stream": True,
            "stream_options": {"include_drafts": True, "include_usage": True},
        })  # fmt: skip
    return made


async def one(client: httpx.AsyncClient, url: str, request: dict[str, Any]) -> dict[str, float]:
    """Seconds to the first draft, to the first final text, and to the end."""
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


def percentiles(times: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """p50 and p99 of every time."""
    return {
        what: {
            f"p{p}": round(float(np.percentile([t[what] for t in times], p)), 4) for p in (50, 99)
        }
        for what in ("first draft", "first text", "end to end")
    }


def measure(name: str, multiples: list[float], count: int) -> dict[str, Any]:
    """Every mode at every rate."""
    points: list[dict[str, Any]] = []
    with server("continuous", name) as a, server("static", name) as b, server("serial", name) as c:
        urls = dict(zip(MODES, (a, b, c), strict=True))
        for url in urls.values():
            asyncio.run(closed(url, requests(name, 2, 99)))  # warm
        alone = asyncio.run(closed(urls["serial"], requests(name, 12, 98)))
        seconds = float(np.mean([t["end to end"] for t in alone]))
        for multiple in multiples:
            for mode in MODES:
                work = requests(name, count, int(1000 * multiple))
                rate = multiple / seconds
                times = asyncio.run(arrive(urls[mode], work, rate, int(1000 * multiple)))
                point = {"mode": mode, "load": multiple, "rate": rate, **percentiles(times)}
                points.append(point)
                print(f"{mode:11} load {multiple:<5} {point['end to end']}", flush=True)
    return {
        "model": name, "rows": ROWS, "requests": count, "lengths": LENGTHS[name],
        "alone_seconds": seconds, "points": points, "load_borne": borne(points, seconds),
    }  # fmt: skip


def borne(points: list[dict[str, Any]], alone: float) -> dict[str, float]:
    """The largest load of each mode at which p99 stays below `PATIENCE` times a request alone, by
    linear interpolation between the loads that were measured; 0 where none did."""
    result = {}
    for mode in MODES:
        curve = [(p["load"], p["end to end"]["p99"]) for p in points if p["mode"] == mode]
        most, limit = 0.0, PATIENCE * alone
        for (low, before), (high, after) in zip([(0.0, alone), *curve], curve, strict=False):
            if after <= limit:
                most = high
                continue
            most = low + (high - low) * max(0.0, limit - before) / max(1e-9, after - before)
            break
        result[mode] = round(most, 2)
    return result


def overhead(repeats: int) -> dict[str, Any]:
    """Processor time of a request over HTTP against the same request on a session, in turns."""
    import threading

    import dllm
    from dllm.serve.run import Server, listen
    from dllm.serve.service import Service
    from dllm.serve.settings import Settings

    model = load("135M")
    sock = listen("127.0.0.1", 0, 30.0)
    serving = Server(Service(model, Settings(page=False)))
    thread = threading.Thread(target=serving.run, args=([sock],), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    body = {"prompt": list(range(20, 52)), "max_tokens": 32, "ignore_eos": True, "stream": True,
            "sampler": "llada(steps=8)", "block_length": 32}  # fmt: skip
    ratios = []
    with dllm.Session(model, sampler="llada(steps=8)") as session:
        for _ in range(repeats + 1):
            began = time.process_time()
            asyncio.run(closed(url, [body]))
            served = time.process_time() - began
            began = time.process_time()
            session.submit(
                body["prompt"], max_new_tokens=32, min_new_tokens=32, block_length=32
            ).result()
            ratios.append(served / (time.process_time() - began))
    serving.should_exit = True
    thread.join()
    return {
        "ratios": [round(ratio, 4) for ratio in ratios[1:]],
        "overhead_percent": round(100 * (float(np.median(ratios[1:])) - 1), 2),
    }


def draw(result: dict[str, Any], file: Path) -> None:
    """p50 and p99 against load, a line per mode."""
    from dllm.eval.plot import new_figure

    with new_figure(9.6, 3.0, [file]) as figure:
        panels = figure.subplots(1, 3, sharey=True)
        for axes, what in zip(panels, ("first draft", "first text", "end to end"), strict=True):
            for mode, colour in zip(MODES, ("#b4470f", "#5b86bd", "#6d6d68"), strict=True):
                points = [point for point in result["points"] if point["mode"] == mode]
                loads = [point["load"] for point in points]
                for p, style in (("p50", "--"), ("p99", "-")):
                    seconds = [point[what][p] / result["alone_seconds"] for point in points]
                    axes.plot(loads, seconds, style, color=colour, marker=".",
                              label=f"{mode}, {p}")  # fmt: skip
            axes.set_title(what, fontsize=9)
            axes.set_yscale("log")
            axes.set_xlabel("load (1: all that serial can do)", fontsize=8)
        panels[0].set_ylabel("times a request alone", fontsize=8)
        panels[0].legend(fontsize=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="load",
                        choices=["load", "overhead", "serve", "draw"])  # fmt: skip
    parser.add_argument("--model", default="nano", choices=list(LENGTHS))
    parser.add_argument("--mode", default="continuous", choices=MODES)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 0.8, 1.2, 1.8, 2.5, 3.5])
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    if given.what == "serve":
        serve(given.mode, given.model)
        return
    if given.what == "overhead":
        write(RESULTS / "serving_overhead.json", overhead(given.repeats))
        return
    suffix = "" if given.model == "nano" else f"_{given.model.lower()}"
    file = RESULTS / f"serving{suffix}.json"
    if given.what == "load":
        write(file, measure(given.model, given.rates, given.requests))
    draw(json.loads(file.read_text()), RESULTS.parents[1] / "docs" / f"serving{suffix}.svg")


if __name__ == "__main__":
    main()
