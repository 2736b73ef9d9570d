"""How a server ends: what was asked is answered, or told why not, and nothing is left over."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

import dllm
from dllm.structured.building import WORKER

from .conftest import PATIENCE, PLAIN, Start, until
from .leftovers import Resources, body

CHAT = "/v1/chat/completions"
DRAFTS: dict[str, Any] = {"stream_options": {"include_drafts": "text"}}


def test_sigterm_lets_requests_end(start: Start, tiny: dllm.DiffusionModel) -> None:
    before = Resources.now()
    served = start(tiny, max_batch_size=2)
    loop = served.server.servers[0].get_loop()

    async def ask() -> tuple[list[httpx.Response], httpx.Response, httpx.Response]:
        async with httpx.AsyncClient(timeout=PATIENCE, **PLAIN) as client:
            posts = [
                asyncio.ensure_future(
                    client.post(served.url + CHAT, json=body(f"r {i}", stream=i % 2 == 0))
                )
                for i in range(6)
            ]
            while served.service.running + served.service.waiting < 6:
                assert not any(post.done() for post in posts), "answered before all had asked"
                await asyncio.sleep(0.005)
            loop.call_soon_threadsafe(served.server.handle_exit, signal.SIGTERM, None)
            while not served.service.draining:
                await asyncio.sleep(0.005)
            late = await client.post(served.url + CHAT, json=body())
            health = await client.get(served.url + "/health")
            return await asyncio.gather(*posts), late, health

    answers, late, health = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [200] * 6
    assert late.status_code == 503 and "retry-after" in late.headers
    assert health.status_code == 503
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()
    until(lambda: Resources.now().files <= before.files + 1)  # the listener, closed by `stop`
    assert threading.active_count() <= before.threads


@pytest.mark.parametrize("signals", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_drain_that_runs_out(start: Start, tiny: dllm.DiffusionModel, signals: int) -> None:
    """What is not answered in time, or by a second signal, is told so, streaming or not,
    likelihoods too."""
    before = Resources.now()
    served = start(tiny, max_batch_size=1, drain=0.2 if signals == 1 else PATIENCE)
    loop = served.server.servers[0].get_loop()
    slow, labels = body(n=8), {"model_name": served.service.name}
    registry = served.service.metrics.registry
    score = {"prompt": "one", "continuation": ["two three four"] * 24, "samples": 4096}

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=PATIENCE, **PLAIN) as client:
            begun = partial(registry.get_sample_value, "dllm_first_draft_seconds_count", labels)
            posts = []

            async def asked(path: str, content: dict[str, Any], ready: Callable[[], Any]) -> None:
                posts.append(asyncio.ensure_future(client.post(served.url + path, json=content)))
                while not ready():
                    assert not any(post.done() for post in posts), "answered before all had asked"
                    await asyncio.sleep(0.005)

            await asked(CHAT, slow | {"stream": True, **DRAFTS}, begun)
            for _ in range(2):
                await asked("/v1/score", score, lambda: True)
            await asked(CHAT, slow, lambda: served.service.running + served.service.waiting > 8)
            for _ in range(signals):
                loop.call_soon_threadsafe(served.server.handle_exit, signal.SIGTERM, None)
            return await asyncio.gather(*posts)

    streamed, first, second, whole = asyncio.run(ask())
    error = json.loads(streamed.text.rstrip().rpartition("data: ")[2])["error"]
    assert streamed.status_code == 200 and error["code"] == "stopping"
    assert whole.status_code == 503 and whole.json()["error"]["code"] == "stopping"
    # each would take a quarter of a minute; the one that runs ends with its next forward
    assert (first.status_code, second.status_code) == (503, 503)
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive() and threading.active_count() <= before.threads


def test_a_structure_that_compiles_does_not_hold_up_the_end(
    start: Start, tiny: dllm.DiffusionModel
) -> None:
    """It would be refused for its steps in the end; that is not waited for."""
    served = start(tiny, drain=0.2)
    parts = {str(i): {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{i + 1}"}] * 2,
                      "minItems": 2, "items": False} for i in range(24)}  # fmt: skip
    schema = {"$ref": "#/$defs/0", "$defs": parts | {"24": {"type": "null"}}}
    answers: list[httpx.Response] = []
    ask = {"messages": body()["messages"], "structured_outputs": {"json": schema}}
    asking = threading.Thread(target=lambda: answers.append(served.post(CHAT, ask)))
    asking.start()
    until(lambda: answers or WORKER._child._lock.locked())
    assert not answers, answers[0].text
    loop = served.server.servers[0].get_loop()
    loop.call_soon_threadsafe(served.server.handle_exit, signal.SIGTERM, None)
    asking.join()
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "stopping"
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()


@pytest.mark.slow
def test_sigterm_of_the_command() -> None:
    """The real process, a real signal, a request in the middle."""
    command = [sys.executable, "-m", "dllm", "serve", "nano", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
    assert run.stderr is not None
    try:
        line = run.stderr.readline()
        url = line.split()[2].removesuffix(",").removesuffix("/v1")
        request = {"messages": [{"role": "user", "content": "Compute 69 + 49."}], "stream": True,
                   "sampler": "llada(steps=64)", "ignore_eos": True, "max_tokens": 64}  # fmt: skip
        with httpx.stream("POST", url + CHAT, json=request, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            run.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        assert run.wait(60) == 0
    finally:
        run.kill()
        run.wait()
        run.stderr.close()
