"""Two replicas in Ray Serve, and a batch through Ray Data.  A cold start takes about a minute."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import dllm

from .conftest import until
from .test_batch import results_of

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CHAT = "/v1/chat/completions"
URL = "http://127.0.0.1:8917"


# On a busy machine Ray gives its own processes up before they have started.
PATIENT = {
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_worker_niceness": "0",  # by default workers get what all others leave
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ.update(PATIENT)
    ray.init(num_cpus=4, log_to_driver=False, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def url(cluster: None) -> Iterator[str]:
    from ray import serve

    from dllm.serve.ray import app

    serve.start(http_options={"host": "127.0.0.1", "port": 8917})
    options: dict[str, Any] = {"num_cpus": 1}
    serve.run(
        app("nano", replicas=2, settings={"max_batch_size": 4}, ray_actor_options=options),
        route_prefix="/",
    )
    yield URL
    serve.shutdown()


def body(i: int, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Compute {10 + i} + 17."}
    return {"messages": [message], "sampler": "llada(steps=32)", "seed": i, **more}


def test_two_replicas_answer_as_one_model(url: str) -> None:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=90) as client:
            return await asyncio.gather(*(client.post(url + CHAT, json=body(i)) for i in range(12)))

    answers = asyncio.run(ask())
    assert {answer.status_code for answer in answers} == {200}
    for i, answer in enumerate(answers):
        plain = dllm.generate("nano", body(i)["messages"], sampler="llada(steps=32)", seed=i)
        assert answer.json()["choices"][0]["message"]["content"] == plain.text


def test_streams_and_leaving(url: str) -> None:
    """Chunks come one by one; a client that leaves frees its row."""
    request = body(1, stream=True, stream_options={"include_drafts": True}, max_tokens=64)
    with httpx.stream("POST", url + CHAT, json=request, timeout=90) as answer:
        chunks = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert chunks[-1] == "data: [DONE]" and len(chunks) > 20
    with httpx.stream("POST", url + CHAT, json=request, timeout=90) as answer:
        next(answer.iter_lines())

    def quiet() -> bool:
        states = [httpx.get(url + "/ready", timeout=30).json() for _ in range(6)]
        return all(state["running"] == 0 for state in states)

    until(quiet, 30)
    refused = httpx.post(url + CHAT, json={"messages": []}, timeout=30)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"


def test_sigterm_of_the_command() -> None:
    """The real process, real signals: what runs in its replicas is answered."""
    command = [sys.executable, "-m", "dllm", "serve", "nano", "--replicas", "2", "--port", "8918"]
    environment = {**os.environ, **PATIENT, "NO_COLOR": "1", "RAY_ADDRESS": "local"}
    run = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
    assert run.stderr is not None
    try:
        while "replicas of" not in (line := run.stderr.readline()):
            assert line, "it ended"
        request = body(1, stream=True, ignore_eos=True, max_tokens=64, n=8)
        request["stream_options"] = {"include_drafts": True}
        with httpx.stream("POST", "http://127.0.0.1:8918" + CHAT, json=request, timeout=90) as got:
            lines = got.iter_lines()
            next(lines)
            run.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert run.wait(90) == 0
    finally:
        run.kill()
        run.communicate()


def test_a_batch_through_ray_data(cluster: None, tmp_path: Path) -> None:
    from dllm.serve.batch import Lines, Results, open_requests
    from dllm.serve.ray import answer_with_ray
    from dllm.serve.settings import Settings

    file, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    rows = [json.dumps({"custom_id": f"r{i}", **body(i)}) for i in range(9)]
    file.write_text("\n".join([*rows, "{"]))
    lines = Lines(file, {}, True)
    for _ in range(2):  # the second run has nothing to do
        with Results(out) as results:
            _, left = open_requests(lines, results)
            answer_with_ray("nano", left, results.add, 1, Settings(max_batch_size=4), {})
    entries = results_of(out)
    assert len(entries) == 10 and entries["line-10"]["error"]["code"] == "invalid_line"
    for i in range(9):
        plain = dllm.generate("nano", body(i)["messages"], sampler="llada(steps=32)", seed=i)
        answer = entries[f"r{i}"]["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == plain.text
