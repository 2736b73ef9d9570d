"""A model split over two processes behind one server: ``torchrun -m dllm serve``."""

from __future__ import annotations

import asyncio
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

from .conftest import PATIENCE, until
from .test_equality import SAMPLERS, alone, mixed, together, tokens_of

CHECKPOINT = Path(__file__).parents[1] / "golden" / "data" / "llada-tiny"
CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def split() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of the server, and ``torchrun``."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m",
               "dllm", "serve", str(CHECKPOINT), "--port", "0", "-c", "dual", "--max-rows", "6",
               "--full-step-tokens", "96", "--name", "split"]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if " at http://" in line:
                break
        else:
            raise AssertionError("torchrun ended")
        yield line.split(" at ")[1].split("/v1")[0], process
    finally:
        process.terminate()  # it ends the ranks, which are in sessions of their own
        process.communicate(timeout=PATIENCE)


def test_it_is_one_process_token_for_token(split: Any) -> None:
    """36 mixed requests, among them some that leave and some that are late."""
    url, _ = split
    model = dllm.load(CHECKPOINT)
    requests = [
        request | {"cache": "dual", "prompt": [5 + i % 9, 7, 9]}
        for i, request in enumerate(mixed(40)) if request["sampler"] != "wino"
    ]  # fmt: skip
    assert len(requests) == 36 and len({r["sampler"] for r in requests}) == len(SAMPLERS) - 1
    for request in requests:
        del request["messages"]

    async def trouble() -> None:
        """Requests that are let go at any moment, while the others run."""
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            for i in range(8):
                body = requests[i] | {"stream": False, "max_tokens": 40, "n": 1}
                if i % 2:
                    late = await client.post(
                        f"{url}/v1/completions", json=body | {"deadline": 0.01}
                    )
                    assert late.status_code in (200, 504)
                    continue
                try:
                    async with asyncio.timeout(0.02 * i):
                        await client.post(f"{url}/v1/completions", json=body)
                except TimeoutError:
                    pass

    async def everything() -> list[httpx.Response]:
        answers, _ = await asyncio.gather(together(url, requests, "/v1/completions"), trouble())
        return answers

    for request, answer in zip(requests, asyncio.run(everything()), strict=True):
        assert tokens_of(request, answer) == alone(model, request), request

    def quiet() -> bool:
        state = httpx.get(f"{url}/ready", timeout=PATIENCE).json()
        return not (state["running"] or state["waiting"] or state["cache_positions_used_ratio"])

    until(quiet)


def test_what_it_does_not_do(split: Any) -> None:
    url, _ = split
    score = {"prompt": "one", "continuation": "two"}
    answer = httpx.post(f"{url}/v1/score", json=score, timeout=PATIENCE)
    assert answer.status_code == 400 and "split" in answer.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/draft/open", json={}, timeout=PATIENCE).status_code == 404


def test_signals_are_for_rank_0(split: Any) -> None:
    """``torchrun`` passes them on to all ranks; what runs is answered, then all of them end."""
    url, process = split
    body = {
        "prompt": [5, 6, 7], "max_tokens": 40, "block_length": 40, "sampler": "fixed(n=1)",
        "ignore_eos": True, "stream": True, "stream_options": {"include_drafts": True},
    }  # fmt: skip
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    process.wait(PATIENCE)
