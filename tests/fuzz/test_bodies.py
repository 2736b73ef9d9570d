"""Random bodies of requests: every one is answered or refused; none is the server's fault."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import dllm
from dllm.serve.app import create_app
from dllm.serve.service import Service
from dllm.serve.settings import Settings

from .seeds import case_of

CHAT = "/v1/chat/completions"
PATIENCE = 90.0  # seconds, on a busy machine
VALUES = [None, True, False, 0, -1, 1, 3, 2**31, 2**63, 10**30, 0.5, -0.5, 1e308, "", "x", "\ud800",
          "\x00", "threshold", "threshold(", "a" * 500, [], [[]], {}, [None], ["x"], [1, 2], [0],
          [10**9], {"a": 1}, [{"role": "user", "content": "x"}], [{"role": "user"}],
          [{"type": "text", "text": "x"}], {"include_usage": True}, "[[1]]",
          "[[0]]", "[[99999]]"]  # fmt: skip


def fuzzed(seed: int) -> tuple[str, bytes]:
    """A path and a body that is wrong in some way, or right by accident."""
    rng = random.Random(seed)
    path = rng.choice([CHAT, "/v1/completions", "/v1/infill", "/v1/score"])
    names = ["messages", "prompt", "suffix", "text", "continuation", "max_tokens", "n", "stop",
             "temperature", "top_p", "top_k", "seed", "stream", "stream_options", "logprobs",
             "top_logprobs", "sampler", "cache", "steps", "block_length", "constraints", "model",
             "min_tokens", "ignore_eos", "eos_policy", "cfg_scale", "samples", "estimator",
             "deadline", "tools", "bogus", "response_format"]  # fmt: skip
    content: dict[str, Any] = {}
    if rng.random() < 0.85:
        content = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "text": "[[1]]",
                   "continuation": "x"}  # fmt: skip
        wanted = {CHAT: ["messages"], "/v1/completions": ["prompt"], "/v1/infill": ["text"],
                  "/v1/score": ["prompt", "continuation"]}[path]  # fmt: skip
        content = {name: content[name] for name in wanted}
        if path in (CHAT, "/v1/completions"):
            content["max_tokens"] = 4
        if path == "/v1/score":
            content["samples"] = 1
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        content[rng.choice(names)] = rng.choice(VALUES)
    data = json.dumps(content).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([rng.randrange(256)]) * rng.randint(0, 3) + data[at + 1 :]
    if rng.random() < 0.02:
        data = b"[" * 100_000
    return path, data


@pytest.fixture(scope="module")
def service(tiny: dllm.DiffusionModel) -> Iterator[Service]:
    threads = threading.active_count()
    service = Service(tiny, Settings())
    yield service
    assert not (service.running or service.waiting)
    for session in service.sessions.values():
        assert not session.positions_used and not session._handles
    handle = service.sessions["none"].submit("hi", max_new_tokens=8)
    assert handle.result(PATIENCE).text == dllm.generate(tiny, "hi", max_new_tokens=8).text
    service.close()
    assert threading.active_count() <= threads


@pytest.mark.fuzz(20)
def test_a_body_is_answered_or_refused(service: Service, seeds: range) -> None:
    codes = asyncio.run(ask(service, seeds))
    assert codes.count(400) > len(seeds) // 4


def test_some_bodies_are_answered(service: Service) -> None:
    assert asyncio.run(ask(service, range(40))).count(200) > 2


async def ask(service: Service, seeds: range) -> list[int]:
    transport = httpx.ASGITransport(create_app(service))
    headers = {"Content-Type": "application/json"}
    codes = []
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        for seed in seeds:
            path, data = fuzzed(seed)
            with case_of(seed, f"{path} {data[:300]!r}"):
                answer = await client.post(path, content=data, headers=headers, timeout=PATIENCE)
                assert answer.status_code in (200, 400, 404, 504), answer.text
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    assert error["message"] and error["type"]
            codes.append(answer.status_code)
    return codes
