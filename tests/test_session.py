"""Continuous batching inside a program: joining, reading, cancelling, deadlines, endings."""

import asyncio
import gc
import os
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import Any

import pytest

import dllm
from dllm.core.canvas import Edit
from dllm.core.text import GrowingText
from dllm.engine import Engine
from dllm.engine.forward import Forward
from dllm.engine.kv import KVBuffer
from dllm.request.prompts import encode
from dllm.runtime.events import Event

PROMPTS = ["Tom has 3 apples.", "Sort 3 1 2.", "x", "Reverse this list: Tom, Anna"]
HOW: dict[str, Any] = {"max_new_tokens": 16, "sampler": "threshold(tau=0.3)"}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Make every forward take so many seconds."""
    launch = Forward.launch

    def delay(seconds: float) -> None:
        def waiting(self: Forward, jobs: list[Any]) -> Any:
            time.sleep(seconds)
            return launch(self, jobs)

        monkeypatch.setattr(Forward, "launch", waiting)

    return delay


@pytest.fixture
def session(tiny: dllm.DiffusionModel) -> Iterator[dllm.Session]:
    with dllm.Session(tiny, cache="dual", max_batch_size=2) as opened:
        yield opened
    assert (opened.running, opened.waiting, opened.positions_used) == (0, 0, 0)
    assert not opened._thread.is_alive()


def test_a_session_that_nobody_holds_is_collected(tiny: dllm.DiffusionModel) -> None:
    """With its thread, and what it keeps."""
    opened = dllm.Session(tiny, cache="dual")
    assert opened.submit(PROMPTS[0], **HOW).result(timeout=60).text is not None
    thread, kept = opened._thread, weakref.ref(opened._scheduler)
    del opened
    deadline = time.monotonic() + 60
    while (thread.is_alive() or kept() is not None) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    assert not thread.is_alive() and kept() is None


def same(a: dllm.Result, b: dllm.Result) -> bool:
    return (a.tokens, a.order, a.nfe, a.computed) == (b.tokens, b.order, b.nfe, b.computed)


def test_what_is_submitted_together_is_what_it_is_alone(
    tiny: dllm.DiffusionModel, session: dllm.Session
) -> None:
    calls = [
        {**HOW, "temperature": 0.7, "seed": 3}, {**HOW, "sampler": "localleap"}, HOW,
        {**HOW, "sampler": "llada", "cfg_scale": 0.5}, {**HOW, "repetition": 1, "temperature": 1.0},
    ]  # fmt: skip
    handles = [session.submit(p, **call) for call in calls for p in PROMPTS[:3]]
    results = iter([handle.result(timeout=60) for handle in handles])
    for call in calls:
        arguments = dict(call)
        repetition = arguments.pop("repetition", 0)
        for prompt in PROMPTS[:3]:
            (alone,) = dllm.generate(
                tiny, [prompt], cache="dual", repetitions=[repetition], **arguments
            )
            assert same(next(results), alone)


def test_events_carry_text_that_only_grows(session: dllm.Session) -> None:
    handle = session.submit(PROMPTS[0], **HOW)
    events = list(handle)
    result = handle.result()
    assert "".join(event.text for event in events) == result.text
    assert events[-1].result is result and all(event.result is None for event in events[:-1])
    committed = {i for event in events for i in event.committed}
    assert committed >= set(range(result.prompt_length, result.prompt_length + len(result.tokens)))
    assert all(event.draft for event in events[:-1]) and not events[-1].draft


def test_a_reader_that_lags_loses_nothing(session: dllm.Session) -> None:
    handle = session.submit(PROMPTS[0], max_events=1, **{**HOW, "sampler": "llada"})
    result = handle.result(timeout=60)
    (event,) = list(handle)
    assert event.text == result.text and event.result is result
    assert len(event.committed) == 16


def test_tasks_read_beside_one_another(session: dllm.Session) -> None:
    async def read(prompt: str) -> tuple[str, dllm.Result]:
        handle = session.submit(prompt, **HOW)
        text = "".join([event.text async for event in handle])
        return text, await handle

    async def everybody() -> list[tuple[str, dllm.Result]]:
        return await asyncio.gather(*(read(prompt) for prompt in PROMPTS * 3))

    for text, result in asyncio.run(everybody()):
        assert text == result.text


def test_who_waits_for_a_result_sleeps_through_the_steps(
    session: dllm.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait() -> list[Any]:
        loop, wakes = asyncio.get_running_loop(), list[Any]()
        call = loop.call_soon_threadsafe

        def woken(*what: Any) -> Any:
            wakes.append(what)
            return call(*what)

        monkeypatch.setattr(loop, "call_soon_threadsafe", woken)
        result = await session.submit(PROMPTS[0], **{**HOW, "sampler": "llada"})
        assert result.nfe == 16
        return wakes

    assert len(asyncio.run(wait())) == 1


def test_a_cancelled_request_leaves_at_once(
    session: dllm.Session, slow: Callable[[float], None]
) -> None:
    slow(0.02)
    running = [session.submit(p, **{**HOW, "sampler": "llada"}) for p in PROMPTS]
    events = iter(running[0])
    for _ in range(3):  # the first step may have begun before the others came
        next(events)
    assert session.running == 2 and session.waiting == 2 and session.positions_used
    for handle in running[:3]:  # two that run and one that waits
        handle.cancel()
    for handle in running[:3]:
        with pytest.raises(dllm.CancelledError):
            handle.result(timeout=10)
        with pytest.raises(dllm.CancelledError):
            list(handle)
    assert len(running[3].result(timeout=60).tokens)


def test_what_is_late_fails_with_its_deadline(
    session: dllm.Session, slow: Callable[[float], None]
) -> None:
    slow(0.05)
    late = session.submit(PROMPTS[0], deadline=0.12, **{**HOW, "sampler": "llada"})
    with pytest.raises(dllm.DeadlineError, match=r"0\.12 s"):
        late.result(timeout=10)
    with pytest.raises(TimeoutError, match="no result after"):
        session.submit(PROMPTS[1], **{**HOW, "sampler": "llada"}).result(timeout=0.01)


def test_the_queue_has_an_end(tiny: dllm.DiffusionModel, slow: Callable[[float], None]) -> None:
    slow(0.05)
    with dllm.Session(tiny, max_batch_size=1, max_waiting=1) as session:
        first = session.submit(PROMPTS[0], **HOW)
        next(iter(first))
        session.submit(PROMPTS[1], **HOW)
        with pytest.raises(dllm.QueueFullError, match="max_waiting=1"):
            session.submit(PROMPTS[2], **HOW)


def test_what_is_wrong_with_a_request_is_said_at_once(session: dllm.Session) -> None:
    for wrong, message in (
        ({"sampler": "nosuch"}, "unknown sampler"), ({"temprature": 1}, "did you mean"),
        ({"max_events": "a"}, "max_events is a whole number from 1, not 'a'"),
        ({"max_batch_size": 3}, "belongs to the session"), ({"max_new_tokens": 4000}, "context"),
        ({"config": dllm.GenerationConfig(max_batch_size=3)}, "belongs to the session"),
        ({"length": "daedal"}, "dual"), ({"repetition": 2**70}, r"below 2\*\*29"),
        ({"cache": "dual"}, "belongs to the session"),
    ):  # fmt: skip
        with pytest.raises(dllm.DllmError, match=message):
            session.submit(PROMPTS[0], **{**HOW, **wrong})
    for repetition in (-1, "a", 1.5, 2**70):
        with pytest.raises(dllm.ConfigError, match="repetitions are whole numbers"):
            session.infill("a [[2]] b", repetition=repetition)
    with pytest.raises(dllm.PromptError):
        session.submit("", **HOW)
    assert session.submit(PROMPTS[0], **HOW).result(timeout=60).tokens


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_each_out_of_memory_error_costs_a_restart_at_most(
    tiny: dllm.DiffusionModel, cache: str
) -> None:
    """In a micro-batch of one row, while others wait for their turn in the same step."""
    how = {"max_new_tokens": 20, "sampler": "llada"}
    prompts = [list(range(10 + i, 40 + i)) for i in range(3)]
    expected = dllm.generate(tiny, prompts, cache=cache, trace=True, **how)
    calls = [0]

    def hook(*_: Any) -> None:
        calls[0] += 1
        if calls[0] in (2, 13):  # in the first step, and in one of the middle
            raise MemoryError("forced")

    with dllm.Session(tiny, cache=cache, max_batch_tokens=1) as session:
        handle = tiny.backbone.register_forward_pre_hook(hook)
        try:
            handles = [session.submit(one, trace=True, **how) for one in prompts]
            results = [h.result(60) for h in handles]
        finally:
            handle.remove()
        assert session.submit(prompts[0], **how).result(60).tokens == expected[0].tokens
    assert [r.tokens for r in results] == [r.tokens for r in expected]
    assert sum(r.restarts for r in results) == 2
    # Without what was begun anew; the last digit of a log-probability depends on the batch.
    steps = [[(step.step, step.window, [commit[:2] for commit in step.commits])
              for step in result.trace.steps] for result in [*results, *expected]]  # fmt: skip
    assert steps[:3] == steps[3:]


def test_a_tokenizer_or_an_observer_that_raises_ends_no_session(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, decode, tokenizer = dllm.generate(tiny, PROMPTS[1], **HOW), None, tiny.tokenizer
    assert tokenizer is not None
    decode = tokenizer.decode

    def refusing(ids: Any, **how: Any) -> Any:
        if list(ids) == bad.tokens:
            raise ZeroDivisionError("no such text")
        return decode(ids, **how)

    monkeypatch.setattr(tokenizer, "decode", refusing)
    with (
        pytest.warns(RuntimeWarning, match="observe raised ZeroDivisionError"),
        dllm.Session(tiny, observe=lambda _: 1 / 0) as session,
    ):
        one, two = (session.submit(prompt, **HOW) for prompt in PROMPTS[:2])
        assert same(one.result(60), dllm.generate(tiny, PROMPTS[0], **HOW))
        with pytest.raises(ZeroDivisionError, match="no such text"):
            two.result(60)
        assert session.submit(PROMPTS[0], **HOW).result(60).tokens


@pytest.mark.parametrize("where", ["_outgrown", "_settle", "free"])
def test_a_fault_around_one_text_stays_with_it(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Slots that one could not give back are there again once nobody is at work."""
    expected = [dllm.generate(tiny, prompt, cache="dual", **HOW).tokens for prompt in PROMPTS[:3]]
    sizes = [len(encode(tiny, prompt)) + HOW["max_new_tokens"] for prompt in PROMPTS[:3]]
    most = max(sizes) if where == "free" else sum(sizes)
    kind: Any = KVBuffer if where == "free" else Engine
    before, bad, raised = getattr(kind, where), encode(tiny, PROMPTS[1]).tolist(), list[int]()

    def failing(self: Any, *given: Any) -> Any:
        row = given[0]
        if where == "free" and not raised:
            raised.append(row)
            raise ZeroDivisionError("injected")
        if where != "free" and row.canvas.tokens[: row.canvas.prompt_length].tolist() == bad:
            raise SystemExit("injected")
        return before(self, *given)

    monkeypatch.setattr(kind, where, failing)
    with dllm.Session(tiny, cache="dual", max_batch_size=3, max_positions=most) as session:
        for _ in range(2):
            handles = [session.submit(prompt, **HOW) for prompt in PROMPTS[:3]]
            for i, (handle, tokens) in enumerate(zip(handles, expected, strict=True)):
                if i == 1 and where != "free":
                    with pytest.raises(RuntimeError, match="SystemExit was raised: injected"):
                        handle.result(60)
                else:
                    assert handle.result(60).tokens == tokens
        assert session.failure is None and session.positions_used == 0


def test_an_engine_that_dies_keeps_nobody_waiting(
    tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = dllm.Session(tiny)
    monkeypatch.setattr(session._scheduler, "advance", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        session.submit(PROMPTS[0], **HOW).result(timeout=10)
    with pytest.raises(dllm.ConfigError, match="closed"):
        session.submit(PROMPTS[0], **HOW)
    session.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_a_session_of_another_process_is_refused(tiny: dllm.DiffusionModel) -> None:
    """A server that loads a program once and forks its workers: no thread comes with them."""
    with dllm.Session(tiny) as session:
        child = os.fork()
        if not child:
            said = ""
            try:
                session.submit(PROMPTS[0], **HOW)
            except dllm.ConfigError as error:
                said = str(error)
            finally:
                os._exit("another process" in said)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_closing_drains_or_cancels(
    tiny: dllm.DiffusionModel, slow: Callable[[float], None]
) -> None:
    slow(0.02)
    how = {**HOW, "sampler": "llada"}
    session = dllm.Session(tiny, max_batch_size=1)
    handles = [session.submit(p, **how) for p in PROMPTS[:2]]
    session.close()
    assert all(handle.result(timeout=0).tokens for handle in handles)
    session = dllm.Session(tiny, max_batch_size=1)
    handles = [session.submit(p, **how) for p in PROMPTS[:2]]
    session.close(timeout=0.05)
    for handle in handles:
        with pytest.raises(dllm.CancelledError):
            handle.result(timeout=0)
    with pytest.raises(dllm.ConfigError, match="closed"):
        session.submit(PROMPTS[0])


def test_holes_are_filled_and_steps_are_reported(tiny: dllm.DiffusionModel) -> None:
    reports: list[dllm.StepReport] = []
    with dllm.Session(tiny, observe=reports.append) as session:
        result = session.infill("Tom has [[2]] apples, [[1]] more").result(timeout=60)
    assert result.text == dllm.infill(tiny, "Tom has [[2]] apples, [[1]] more").text
    assert result.decided == 3 == sum(report.committed for report in reports)
    assert sum(report.positions for report in reports) == result.computed
    assert all(0 < report.forward_seconds <= report.seconds for report in reports)


def test_threads_submit_at_once(tiny: dllm.DiffusionModel, session: dllm.Session) -> None:
    alone = [dllm.generate(tiny, p, cache="dual", **HOW) for p in PROMPTS]

    def work(number: int) -> None:
        for i in range(3):
            which = (number + i) % len(PROMPTS)
            assert same(session.submit(PROMPTS[which], **HOW).result(timeout=60), alone[which])

    with ThreadPoolExecutor(8) as pool:
        [*pool.map(work, range(8))]


def test_threads_that_encode_do_not_change_one_anothers_text(tiny: dllm.DiffusionModel) -> None:
    """Text that spells a special token, beside templates whose special tokens are meant."""
    assert tiny.tokenizer is not None
    spelled = f"a {tiny.tokenizer.eos_token} b"
    expected = [encode(tiny, spelled, chat).tolist() for chat in (False, True)]

    def work(chat: bool) -> None:
        for _ in range(200):
            assert encode(tiny, spelled, chat).tolist() == expected[chat]

    with ThreadPoolExecutor(4) as pool:
        [*pool.map(work, [True, False] * 2)]


# -- the parts it is made of ---------------------------------------------------------------------


def test_text_waits_for_whole_characters_and_stop_strings() -> None:
    pieces = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"STO", 5: b"P!", 6: b"x"}

    def decode(ids: Any) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    text = GrowingText(decode, ("STOP",))
    assert [text.feed([i]) for i in (1, 2, 3, 4, 6)] == ["a", "", "é", "", "STOx"]
    stopped = GrowingText(decode, ("STOP",))
    assert [stopped.feed([i]) for i in (1, 4, 5)] == ["a", "", ""]
    assert stopped.end("a") == ""


def test_nothing_is_lost_behind_bytes_that_turn_out_to_be_no_character() -> None:
    """Decoders of SentencePiece then show none of their run as a character."""
    bytes_of = {0: b"\xc9", 1: b"\xa4", 2: b"\xff"}

    def decode(ids: Any) -> str:
        tokens = [bytes_of.get(i, b"a") for i in ids]
        runs = [[*run] for _, run in groupby(tokens, lambda token: token == b"a")]
        return "".join(
            b"".join(run).decode() if b"\xff" not in run else "\ufffd" * len(run) for run in runs
        )

    text = GrowingText(decode)
    assert [text.feed(ids) for ids in ([3, 0, 1], [2], [3, 3])] == ["a\u0264", "", ""]
    assert text.end(decode([3, 0, 1, 2, 3, 3])) == "\ufffd\ufffd\ufffdaa"


def test_merged_events_say_what_both_said() -> None:
    canvas: Any = None
    first = Event(0, 1, {3: 7, 4: 8}, {5: 1}, [], canvas, tokens=[7])
    second = Event(0, 2, {5: 9}, {6: 1}, [4], canvas, tokens=[9], tail=[-1])
    both = first.merged(second)
    assert both.committed == {3: 7, 5: 9} and both.remasked == [4]
    assert both.drafts == {6: 1} and both.tokens == [7, 9] and both.step == 2
    grown = Event(0, 3, {}, {}, [], canvas, edits=(Edit(4, 0, 2, None),))
    both = second.merged(grown)
    assert both.committed == {7: 9} and both.remasked == [6]
