"""Replicas on a cluster of several nodes, and a batch through Ray Data, while parts of them are
killed.  A cold start takes about a minute."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import dllm

from .conftest import until
from .test_batch import results_of

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CHAT = "/v1/chat/completions"
# On a busy machine Ray gives its own processes up before they have started.
PATIENT = {
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_worker_niceness": "0",  # by default workers get what all others leave
    "OMP_NUM_THREADS": "1",
    "NO_COLOR": "1",
}
SLOWLY = {"sampler": "llada(steps=64)", "max_tokens": 64}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, with room for a replica each; a third one comes and goes."""
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(PATIENT | {"RAY_AUTH_MODE": "disabled"})
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    nodes.add_node(num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()
    os.environ.clear()
    os.environ.update(before)


@contextmanager
def command(*more: str, **environment: str) -> Iterator[tuple[str, psutil.Popen]]:
    """``dllm serve --replicas 2``, once it says where; its address and process."""
    line = [sys.executable, "-m", "dllm", "serve", "nano", "--replicas", "2", "--port", "0", *more]
    run = psutil.Popen(
        line, stderr=subprocess.PIPE, env={**os.environ, **PATIENT, **environment}, text=True
    )
    try:
        while " replicas of " not in (said := run.stderr.readline()):
            assert said, "it ended"
        rest = threading.Thread(target=run.stderr.read)  # a full pipe would stop it
        rest.start()
        yield said.split(" at ", 1)[1].split("/v1")[0], run
        if run.is_running():
            run.terminate()
        assert run.wait(120) == 0
        rest.join()
    finally:
        if run.is_running():
            run.kill()
        run.stderr.close()


@pytest.fixture(scope="module")
def served(cluster: Any) -> Iterator[tuple[str, psutil.Popen]]:
    with command("--max-batch-size", "4", RAY_ADDRESS=cluster.address) as (url, run):
        yield url, run


def body(i: int, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": f"Compute {10 + i % 80} + 17."}
    return {"messages": [message], "sampler": "llada(steps=32)", "seed": i, **more}


def plain(i: int, **more: Any) -> str:
    how = {"sampler": "llada(steps=32)"} | more
    return dllm.generate("nano", body(i)["messages"], seed=i, **how).text


async def asked(url: str, count: int, at_a_time: int, stream: bool = False) -> list[Any]:
    """What becomes of ``count`` requests, every second one a stream where some are."""
    room = asyncio.Semaphore(at_a_time)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)

    async def one(i: int) -> httpx.Response:
        async with room:
            return await client.post(url + CHAT, json=body(i, stream=stream and i % 2 == 0))

    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        return await asyncio.gather(*map(one, range(count)))


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def processes(name: str) -> list[psutil.Process]:
    """Those of Ray that are called so."""
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if name in " ".join(one.info["cmdline"] or ())]


def test_two_replicas_answer_as_one_model(served: Any) -> None:
    url, _ = served
    answers = asyncio.run(asked(url, 12, 12))
    assert {answer.status_code for answer in answers} == {200}
    assert [text_of(answer) for answer in answers] == [plain(i) for i in range(12)]
    told = [httpx.get(url + "/metrics", timeout=90).text for _ in range(8)]
    names = [{*re.findall(r'model_name="nano",replica="(\w+)"', one)} for one in told]
    assert all(len(each) == 1 for each in names)


def test_streams_and_leaving(served: Any) -> None:
    """Chunks come one by one; a client that leaves frees its row."""
    url, _ = served
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


def test_one_of_two_replicas_is_killed(served: Any) -> None:
    """Whole answers come of the other one, streams that had begun end with an error."""
    url, _ = served
    more = {"sampler": "llada(steps=256)", "max_tokens": 256, "ignore_eos": True, "stream": True,
            "stream_options": {"include_drafts": True}}  # fmt: skip

    async def ends_and_answers() -> tuple[list[str], list[httpx.Response]]:
        """The last event of each stream, and the whole answers."""
        one, _ = processes("ray::ServeReplica")
        async with httpx.AsyncClient(timeout=300) as client, AsyncExitStack() as stack:
            parts = []
            for i in range(4):  # four rows fit into one replica: all begin
                opened = client.stream("POST", url + CHAT, json=body(i, **more))
                parts.append((await stack.enter_async_context(opened)).aiter_text())
            heads = [await anext(part) for part in parts]
            posts = [
                asyncio.ensure_future(client.post(url + CHAT, json=body(i, **SLOWLY, n=6)))
                for i in range(4)
            ]
            one.kill()
            texts = [
                head + "".join([text async for text in part])
                for head, part in zip(heads, parts, strict=True)
            ]
            answers = await asyncio.gather(*posts)
        return [text.rstrip().rpartition("data: ")[2] for text in texts], answers

    lost: list[str] = []
    while not lost:  # all streams may have been in the replica that lives
        ends, answers = asyncio.run(ends_and_answers())
        for i, answer in enumerate(answers):
            assert answer.status_code == 200
            how = {"sampler": "llada(steps=64)", "max_new_tokens": 64}
            assert text_of(answer) == plain(i, **how)
        lost = [json.loads(end)["error"]["code"] for end in ends if end != "[DONE]"]
        until(lambda: len(processes("ray::ServeReplica")) == 2)
    assert set(lost) == {"replica_lost"}


def test_a_process_that_listens_is_killed(served: Any) -> None:
    """The port stays open, and another process starts."""
    url, run = served
    before = {child.pid for child in run.children() if "spawn_main" in " ".join(child.cmdline())}
    assert len(before) == 2
    psutil.Process(min(before)).kill()
    for i in range(10):
        answer = httpx.post(url + CHAT, json=body(i), timeout=90)
        assert answer.status_code == 200

    def back() -> bool:
        now = [child for child in run.children() if "spawn_main" in " ".join(child.cmdline())]
        return len([child for child in now if child.pid != min(before)]) == 2

    until(back)


def test_replicas_come_and_go_under_requests(cluster: Any, served: Any) -> None:
    """Scaled up and down, and with a node of theirs killed, not one whole answer is lost."""
    from ray import serve

    from dllm.serve.ray import app

    url, _ = served
    (name,) = [name for name in serve.status().applications if name.startswith("dllm-")]
    more = cluster.add_node(num_cpus=2)
    count, answers = 200, list[Any]()
    asking = threading.Thread(target=lambda: answers.extend(asyncio.run(asked(url, count, 8))))
    asking.start()
    settings = {"max_batch_size": 4}
    for replicas in (4, 2, 4):
        serve.run(app("nano", replicas, settings), name=name, route_prefix=None)
    cluster.remove_node(more, allow_graceful=False)
    asking.join()
    assert [answer.status_code for answer in answers] == [200] * count
    for i in random.Random(1).sample(range(count), 20):
        assert text_of(answers[i]) == plain(i)


def test_sigterm_ends_what_the_command_started(cluster: Any) -> None:
    """A stream is answered to its end; other applications of the cluster stay."""
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 0})
    class Other:
        def __call__(self) -> str:
            return "here"

    other = serve.run(Other.bind(), name="other", route_prefix=None)
    with command(RAY_ADDRESS=cluster.address) as (url, run):
        names = [name for name in serve.status().applications if name.endswith(url[-5:])]
        assert len(names) == 1
        request = body(1, **SLOWLY, stream=True, n=8, stream_options={"include_drafts": True})
        with httpx.stream("POST", url + CHAT, json=request, timeout=90) as got:
            lines = got.iter_lines()
            next(lines)
            run.terminate()
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert other.remote().result() == "here"
    assert names[0] not in serve.status().applications
    serve.delete("other")


def test_replicas_in_a_ray_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray asks for its token, and only the replicas' own ports, which do so, are open to other
    machines; nothing of it is left in the end."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    with command() as (url, run):
        family = [run, *run.children(recursive=True)]
        for one in family:
            if "ServeReplica" in " ".join(one.cmdline()):
                continue
            for connection in one.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip in ("127.0.0.1", "::ffff:127.0.0.1"), one
        raylet = next(one for one in family if one.name() == "raylet")
        assert raylet.environ()["RAY_AUTH_MODE"] == "token"
        assert httpx.post(url + CHAT, json=body(1), timeout=90).status_code == 200
    until(lambda: not any(one.is_running() for one in family))


def test_a_batch_through_ray_data(cluster: Any, tmp_path: Path) -> None:
    """Its worker is killed twice: no line is lost, and none is stored twice."""
    from dllm.serve.batch import Lines, Results, open_requests
    from dllm.serve.ray import answer_with_ray
    from dllm.serve.settings import Settings

    file, out, count = tmp_path / "requests.jsonl", tmp_path / "out.jsonl", 500
    rows = [json.dumps({"custom_id": f"r{i}", **body(i, max_tokens=16)}) for i in range(count)]
    file.write_text("\n".join([*rows, "{"]))
    lines = Lines(file, {}, True)
    kills, ended = list[int](), threading.Event()

    def killer() -> None:
        while len(kills) < 2 and not ended.wait(1):
            workers = [one for one in processes("MapWorker") if one.pid not in kills]
            busy = [one for one in workers if sum(one.cpu_times()[:2]) > 5]  # it has its model
            if busy:
                time.sleep(1)
                kills.append(busy[0].pid)
                busy[0].kill()

    killing = threading.Thread(target=killer)
    killing.start()
    for _ in range(2):  # the second run has nothing to do
        with Results(out) as results:
            _, left = open_requests(lines, results)
            answer_with_ray("nano", left, results.add, 2, Settings(max_batch_size=4), {})
    ended.set()
    killing.join()
    assert len(kills) == 2
    stored = [json.loads(line)["custom_id"] for line in out.read_text().splitlines()]
    assert len(stored) == len(set(stored)) == count + 1
    entries = results_of(out)
    assert entries[f"line-{count + 1}"]["error"]["code"] == "invalid_line"
    for i in random.Random(1).sample(range(count), 20):
        answer = entries[f"r{i}"]["response"]["body"]
        assert answer["choices"][0]["message"]["content"] == plain(i, max_new_tokens=16)
