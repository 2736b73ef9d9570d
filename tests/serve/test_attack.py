"""What one client can do to the others: long prompts, large bodies, large echoes."""

import asyncio
import gc
import json
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

import dllm
from dllm.core.errors import DeadlineError, PromptError, QueueFullError
from dllm.core.text import hole_forms
from dllm.serve import chats, reading
from dllm.serve.bodies import ScoreBody
from dllm.serve.encoding import (
    CHARACTERS_PER_TOKEN,
    LONG,
    SHARE,
    THREADS,
    Encoder,
    FairQueue,
    check,
)
from dllm.serve.problems import Problem
from dllm.serve.requests import read_chat, read_text
from dllm.serve.responses import read_response
from dllm.serve.service import Service
from dllm.structured import expressions

from ..thin import some
from .conftest import PATIENCE, Served, Start, block_model, held, idle, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
MARKS = "e" + "\u0301" * 50_000
ANSWERED = 4096  # bytes that an error may have


def hello(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}


BEYOND: list[tuple[str, Any]] = [  # made where they are sent: they are large
    (TEXT, lambda: {"prompt": MARKS * 40}),
    (TEXT, lambda: {"prompt": ["a" * 7_000_000]}),
    (TEXT, lambda: {"prompt": [5] * 1_000_000}),
    (TEXT, lambda: {"prompt": "a", "suffix": MARKS}),
    (CHAT, lambda: {"messages": [{"role": "user", "content": "a" * 5000}] * 500}),
    ("/v1/infill", lambda: {"text": "a" * 3_000_000 + "[[1]]"}),
    ("/v1/infill", lambda: {"text": "x[[1]]" * 100_000}),
    ("/v1/score", lambda: {"prompt": "a", "continuation": MARKS * 3}),
    (CHAT, lambda: hello(constraints={str(i): "a" for i in range(200_000)})),
    (CHAT, lambda: hello(stop=["a" * 100_000])),
    (CHAT, lambda: hello(initial_text=MARKS)),
    (CHAT, lambda: hello(initial_text=[5] * 1_000_000)),
    (CHAT, lambda: hello(constraints={"0": MARKS})),
    (CHAT, lambda: hello(tools=[{"function": {"name": "f", "description": MARKS}}])),
    ("/v1/step", lambda: {"tokens": [-1] * 1_000_000}),
]


@pytest.mark.parametrize(("path", "body"), BEYOND)
def test_what_cannot_fit_is_not_read(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the tokenizer was asked")

    monkeypatch.setattr("dllm.request.prompts._ids_of", never)
    monkeypatch.setattr(chats, "shows_tools", lambda _: True)
    answer = served.post(path, body())
    assert answer.status_code == 400 and len(answer.content) < ANSWERED, answer.text[:500]


LARGEST: dict[str, tuple[str, Any]] = {
    "biases": (CHAT, lambda: hello(logit_bias={str(i): 1 for i in range(400_000)})),
    "ids": (TEXT, lambda: {"prompt": [5] * 600_000}),
    "drafts": (CHAT, lambda: hello(initial_text=[5] * 600_000)),
    "constraints": (CHAT, lambda: hello(constraints={str(i): "a" for i in range(200_000)})),
    "turns": (CHAT, lambda: hello(messages=[{"role": "user", "content": ""}] * 30_000)),
    "variables": (CHAT, lambda: hello(chat_template_kwargs={str(i): 1 for i in range(300_000)})),
    "parameters": (CHAT, lambda: hello(tools=[{"type": "function", "function": {
        "name": "f", "parameters": {str(i): 1 for i in range(300_000)}}}])),
    "metadata": ("/v1/responses", lambda: {
        "input": "a", "metadata": dict.fromkeys(map(str, range(9**5)))}),
    "positions": ("/v1/step", lambda: {"tokens": [-1] * 600_000}),
    "tokens": ("/detokenize", lambda: {"tokens": [5] * 600_000}),
    "nothing": (CHAT, lambda: [[]] * 600_000),
}  # fmt: skip


@pytest.mark.parametrize("kind", some(LARGEST, 2))
def test_large_bodies_are_parsed_where_nobody_waits(
    served: Served, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The process that answers does not parse them: it would hold up everybody's answers."""
    monkeypatch.setattr(reading, "json", None)
    path, body = LARGEST[kind]
    answer = served.post(path, body())
    assert answer.status_code == 400 and len(answer.content) < ANSWERED, answer.text[:500]


def test_what_is_read_elsewhere_is_no_larger_than_what_is_asked(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clients echo and nobody reads does not come back from there."""
    small = hello(seed=3, temperature=1.0)
    large = small | {"messages": [{**small["messages"][0], "annotations": [5] * 500_000}]}
    ask = reading.from_json(read_chat, json.dumps(large).encode(), 100)
    assert len(pickle.dumps(ask)) < ANSWERED
    plain = served.post(CHAT, small).json()
    monkeypatch.setattr(reading, "json", None)
    answer = served.post(CHAT, large).json()
    assert answer["choices"] == plain["choices"] and answer["usage"] == plain["usage"]


def test_a_reader_that_is_killed_comes_back(served: Served) -> None:
    body = hello(messages=[{"role": "user", "content": "hi", "id": "x" * reading.LARGE}])
    plain = served.post(CHAT, body).json()["choices"]
    process = served.service.reader._child._process
    assert process is not None
    process.kill()
    process.wait()
    assert served.post(CHAT, body).json()["choices"] == plain


WRONG: dict[str, Any] = {
    "messages": (read_chat, lambda: {"messages": [{"role": 5}] * 200_000}),
    "parts": (read_chat, lambda: hello(messages=[{"role": "user", "content": [5] * 300_000}])),
    "calls": (
        read_chat,
        lambda: hello(messages=[{"role": "assistant", "tool_calls": [5] * 300_000}]),
    ),
    "tools": (read_chat, lambda: hello(tools=[5] * 300_000)),
    "biases": (read_chat, lambda: hello(logit_bias={str(i): "x" for i in range(300_000)})),
    "fields": (read_chat, lambda: hello(**{f"x{i}": 1 for i in range(300_000)})),
    "options": (
        read_chat,
        lambda: hello(stream=True, stream_options={f"x{i}": 1 for i in range(300_000)}),
    ),
    "prompts": (read_text, lambda: {"prompt": [5] * 599_999 + ["a"]}),
    "choices": (
        read_text,
        lambda: {"prompt": "a", "structured_outputs": {"choice": [5] * 300_000}},
    ),
    "items": (read_response, lambda: {"input": [{"type": 5}] * 200_000}),
    "texts": (ScoreBody.read, lambda: {"continuation": [5] * 300_000}),
}


@pytest.mark.parametrize("kind", some(WRONG, 3))
def test_the_first_mistake_ends_the_reading(kind: str) -> None:
    """A wrong body costs about what it takes to write it down, whatever its number of mistakes."""
    read, make = WRONG[kind]
    body = make()

    def seconds(work: Callable[[], Any]) -> float:
        costs = []
        gc.disable()  # what a collection costs depends on all that the tests before have made
        for _ in range(3):
            began = time.process_time()
            work()
            costs.append(time.process_time() - began)
        gc.enable()
        return min(costs)

    def refuse() -> None:
        with pytest.raises(Problem) as caught:
            read(body)
        assert caught.value.status == 400 and len(caught.value.message) < ANSWERED

    assert seconds(refuse) < 8 * seconds(lambda: json.dumps(body)) + 0.05


@pytest.mark.parametrize("sign", "a]")
def test_holes_that_never_end_take_linear_time(sign: str) -> None:
    def seconds(size: int) -> float:
        text = "[[8:" * size + sign * 400 * size
        began = time.process_time()
        assert len(hole_forms(text)) <= 1
        return time.process_time() - began

    assert seconds(4000) < 24 * seconds(500) + 0.1  # eight times as long, 64 squared


def test_clients_take_turns_where_work_takes_long() -> None:
    """One who asks for much waits for itself, and is told why; others are at most behind what runs
    already."""
    line, go_on, order = FairQueue("test"), threading.Event(), list[str]()

    def work(name: str) -> Callable[[], str]:
        def run() -> str:
            order.append(name)
            assert go_on.wait(PATIENCE)
            return name

        return run

    try:
        mine = [line.submit("greedy", work(f"greedy {i}")) for i in range(SHARE)]
        with pytest.raises(QueueFullError, match=f"{SHARE} of yours wait already"):
            line.submit("greedy", work("more"))
        other = line.submit("other", work("other"))
        left = line.submit("third", work("third"))
        left.cancel()
        again = line.submit("third", work("fourth"))
        until(lambda: len(order) == THREADS)  # and nobody more: they wait
        go_on.set()
        assert other.result(PATIENCE) == "other" and again.result(PATIENCE) == "fourth"
        assert [one.result(PATIENCE) for one in mine] == [f"greedy {i}" for i in range(SHARE)]
        assert order.index("other") < THREADS and "third" not in order
        line.submit("greedy", work("later")).result(PATIENCE)
    finally:
        go_on.set()
        line.close()
    with pytest.raises(RuntimeError):
        line.submit("greedy", work("late"))


def test_forms_of_holes_are_built_where_nobody_waits(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is, others are answered; a known one is at once."""
    body = {"text": "I have [[2:[1-9]{1,2}]] apples."}
    answers: list[httpx.Response] = []
    with held(monkeypatch, Service, "_submitted", lambda _, ask, *__: ask.text == body["text"],
              lambda: answers.append(served.post("/v1/infill", body))):  # fmt: skip
        assert served.post(CHAT, hello()).status_code == 200
        assert served.post("/v1/infill", {"text": "I have [[2]] apples."}).status_code == 200
    assert answers[0].status_code == 200, answers[0].text
    lines = []
    run = served.service.encoder.run

    async def watched(*how: Any, **more: Any) -> Any:
        lines.append(how[4])
        return await run(*how, **more)

    monkeypatch.setattr(served.service.encoder, "run", watched)
    assert served.post("/v1/infill", body).json()["choices"] == answers[0].json()["choices"]
    assert lines == [False]


def test_the_server_itself_reads_no_expression(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wide classes without case take Python's parser seconds: the worker's, not the server's."""
    parse, read = expressions.PARSER.parse, []

    def watched(pattern: str, *how: Any) -> Any:
        read.append(pattern)
        return parse(pattern, *how)

    monkeypatch.setattr(expressions.PARSER, "parse", watched)
    wide = r"(?i:[!-\uffff])"
    given = [served.post(CHAT, hello(structured_outputs={"regex": wide * n})) for n in (2, 300)]
    assert [one.status_code in (200, 400) for one in given] == [True, True]
    assert not any("uffff" in pattern for pattern in read)
    assert given[0].status_code == 200, given[0].text


def test_bodies_that_are_nested(served: Served) -> None:
    """So deeply that one step or another of reading them gives up."""
    tools = '"tools": [{"type": "function", "function": {"name": "f", "parameters": %s}}]'
    allowed = '{"type": "allowed_tools", "mode": "auto", "tools": ['
    cases = [('"metadata": %s', '{"a": ', "}", depth) for depth in range(900, 1000, 3)]
    cases += [(f"{tools % {}}, " + '"tool_choice": %s', allowed, "]}", 400),
              (f'{tools}, "tool_choice": "required"', '{"anyOf": [', "]}", 400)]  # fmt: skip
    for field, begin, end, depth in cases:
        nested = field % (begin * depth + '{"type": "integer"}' + end * depth)
        answer = httpx.post(
            served.url + CHAT, content=json.dumps(hello())[:-1] + f", {nested}}}",
            headers={"Content-Type": "application/json"}, timeout=PATIENCE,
        )  # fmt: skip
        assert answer.status_code in (200, 400), (nested[:80], depth, answer.text)


def test_numbers_that_are_infinite(served: Served) -> None:
    for schema in ('{"type": "array", "maxItems": 1e999}', '{"enum": [1e999]}',
                   '{"type": "integer", "minimum": -1e999}'):  # fmt: skip
        form = f'{{"structured_outputs": {{"json": {schema}}}, "prompt": "a"}}'
        answer = served.ask("POST", TEXT, content=form, headers=JSON)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("name", some(["block", "nano-ar"], 1))
def test_nobody_learns_what_others_asked(start: Start, name: str) -> None:
    """What is kept of a prompt is found again by its key and user alone."""
    model = dllm.load("nano-ar") if name == "nano-ar" else block_model()
    served = start(model, api_key="one,two", prefix_cache_tokens=None,
                   **({"caches": ("block",)} if name == "block" else {}))  # fmt: skip
    turn = [{"role": "user", "content": "Tom has 12 apples and Anna has 30 apples.  How many?"}]

    def cached(key: str, **more: Any) -> int:
        answer = served.post(CHAT, {"messages": turn, "max_tokens": 4, "ignore_eos": True, **more},
                             headers={"x-api-key": key})  # fmt: skip
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    whole = [cached("one"), cached("one")]
    assert whole[0] == 0 < whole[1]
    assert cached("two") == 0 == cached("one", user="a") == cached("one", cache_salt="b")
    assert cached("two") == cached("one", user="a") == cached("one", cache_salt="b") == whole[1]


def test_a_long_prompt_holds_up_nobody(
    served: Served, tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is read, others are read and answered; who waits behind it and leaves is not."""
    most = CHARACTERS_PER_TOKEN * tiny.facts.context_length
    long = {"prompt": ["a" * most] * (1 + LONG // most), "max_tokens": 4}
    read: list[Any] = []

    def is_long(model: Any, prompt: Any, *how: Any) -> bool:
        read.extend([prompt] * (len(prompt) == most))
        return len(prompt) == most

    with held(monkeypatch, chats, "encode", is_long, lambda: served.post(TEXT, long)):
        for _ in range(3):
            assert served.post(CHAT, hello()).status_code == 200
        served.leave(TEXT, long, 0.3)
        time.sleep(0.1)
    until(lambda: idle(served))
    assert len(read) <= len(long["prompt"])  # the second one was never begun


def test_a_known_form_does_not_wait_behind_one_that_is_built(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = hello(structured_outputs={"regex": "[a-c]{1,3}"})
    new = hello(structured_outputs={"regex": "[d-f]{1,3}"})
    plain = served.post(CHAT, known).json()["choices"]
    is_new = lambda _, ask, *__: "d-f" in ask.arguments["regex"]  # noqa: E731
    with held(monkeypatch, Service, "_submitted", is_new, lambda: served.post(CHAT, new)):
        assert served.post(CHAT, known).json()["choices"] == plain
    until(lambda: idle(served))


def test_reading_counts_against_the_deadline(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = chats.encode
    monkeypatch.setattr(chats, "encode", lambda *given: time.sleep(0.3) or encode(*given))
    answer = served.post(TEXT, {"prompt": ["one", "two"], "deadline": 0.2, "max_tokens": 4})
    assert answer.status_code == 504


def test_an_encoder_gives_up(tiny: dllm.DiffusionModel) -> None:
    encoder = Encoder(tiny, limit=10)
    assert check(["ab", [{"role": "user", "content": "cde"}], [1, 2]], 10) == 2 + 4 + 3
    for text, found in (("a" * 161, "161 char"), ([*range(11)], "11 tokens"), ([{}] * 11, "11 pa")):
        with pytest.raises(PromptError, match=found):
            check([text], 10)

    async def late() -> None:
        await encoder.run(lambda model, go_on: None, ["a"], time.monotonic() - 1)

    with pytest.raises(DeadlineError):
        asyncio.run(late())
    encoder.close()


@pytest.mark.slow
def test_a_poisoned_request_beside_ordinary_ones(start: Start) -> None:
    """What the tokenizer takes longest for, again and again: the p99 of the others stays."""
    served = start(dllm.load("nano"))
    context = served.service.model.facts.context_length
    poison = {"prompt": [("e" + "\u0301" * 50)[: CHARACTERS_PER_TOKEN * context] * 30] * 64}
    stop = threading.Event()

    def poisoner() -> None:
        while not stop.is_set():
            served.post(TEXT, poison)

    def p99() -> float:
        seconds = []
        for _ in range(50):
            began = time.perf_counter()
            assert served.post(CHAT, hello(max_tokens=16)).status_code == 200
            seconds.append(time.perf_counter() - began)
        return float(np.percentile(seconds, 99))

    p99()
    alone, thread = p99(), threading.Thread(target=poisoner)
    thread.start()
    beside = p99()
    stop.set()
    thread.join(PATIENCE)
    assert beside < 2 * alone + 0.05, (alone, beside)


BIG = "z" * 300_000


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": BIG}, {"cache": BIG}, {"eos_policy": BIG}, {BIG: 1}, {"model": BIG},
        {"stream": True, "stream_options": {BIG: True}}, {"tool_choice": BIG}, {"user": [BIG]},
        {"sampler": [BIG] * 3}, {"stop": {"a": [[BIG]] * 9}}, {"metadata": BIG},
        {"messages": [{"role": BIG, "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "name": [BIG]}]},
        {"messages": [{"role": "user", "content": [{"type": BIG}]}]},
    ],
)  # fmt: skip
def test_errors_do_not_echo(
    served: Served, caplog: pytest.LogCaptureFixture, more: dict[str, Any]
) -> None:
    answer = served.post(CHAT, hello(**more))
    assert answer.status_code in (400, 404) and len(answer.content) < ANSWERED
    assert "z" * 201 not in answer.text
    assert sum(len(record.getMessage()) for record in caplog.records) < ANSWERED
