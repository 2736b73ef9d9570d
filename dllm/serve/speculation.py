"""An autoregressive model at work: rounds of drafting and verification for many texts.

Every round scores in one forward the drafts of all texts: of requests that are written here, with a
drafter of the server, and of devices that draft themselves and send what they propose (SLED, arXiv
2506.09397, has devices draft and one server verify).  One thread owns the verifier.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import GenerationConfig
from ..drafting.api import ARGUMENTS, fit
from ..drafting.api import Session as Settled
from ..drafting.base import EMPTY, Budget, Draft, Drafter
from ..drafting.bridges.remote import checked
from ..drafting.loop import RoundClock, Speculation
from ..drafting.verifiers.base import Scored
from ..drafting.verifiers.packed import open_verifier
from ..errors import (
    CancelledError,
    ConfigError,
    DeadlineError,
    PromptError,
    QueueFullError,
    UnknownNameError,
)
from ..prompts import encode
from ..session import StepReport
from ..text import GrowingText

if TYPE_CHECKING:
    from ..canvas import IntArray
    from ..models import DiffusionModel

MOST_TEXTS = 256  # of devices; the one that was silent longest goes first
LONGEST_DRAFT = 64
IDLE_SECONDS = 0.2
NOT_HERE = ("sampler", "trace")


@dataclass(frozen=True)
class Written:
    """What a round added to a text, of ``tokens`` tokens; ``result`` is set by the last one."""

    text: str = ""
    draft: str = ""
    result: Any = None
    tokens: int = 0


@dataclass(eq=False)
class Run:
    """A request that is written here: iterate for what every round adds, or await its result."""

    session: SpeculativeSession
    settled: Settled
    prompt: IntArray
    row: int
    deadline: float | None
    growing: GrowingText
    submitted: float = field(default_factory=time.perf_counter)
    queue_seconds: float | None = None
    speculation: Speculation | None = None
    outcome: Any = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._news: deque[Written] = deque()
        self._wake: Callable[[], None] | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self.outcome is not None or self.error is not None

    @property
    def prompt_tokens(self) -> int:
        """Tokens that were given."""
        return len(self.prompt)

    def cancel(self) -> None:
        """Give the request up before the next round."""
        if not self.done:
            error = CancelledError("the request was cancelled")
            self.session._do(partial(self.session._drop, self, error))

    async def __aiter__(self) -> AsyncIterator[Written]:
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(woken.set)

        self._wake = wake
        while True:
            woken.clear()
            with self._lock:
                news = self._news.popleft() if self._news else None
            if news is not None:
                yield news
                if news.result is not None:
                    return
            elif self.error is not None:
                raise self.error
            else:
                await woken.wait()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def _result(self) -> Any:
        async for _ in self:
            pass
        return self.outcome

    def put(self, news: Written) -> None:
        with self._lock:
            self._news.append(news)
        self.woken()

    def woken(self) -> None:
        if self._wake is not None:
            self._wake()


@dataclass(eq=False)
class Device:
    """A text whose drafts come from a device."""

    speculation: Speculation
    seen: float = field(default_factory=time.monotonic)


class SpeculativeSession:
    """What `dllm.Session` is to diffusion models: `submit` at any time, from any thread.

    ``drafter``: of the texts that are written here; None decodes plainly.  ``max_rows`` bounds
    them, ``max_waiting`` those that wait beside them.
    """

    positions = positions_used = 0

    def __init__(
        self, model: DiffusionModel, drafter: Drafter | None = None, *, max_rows: int = 16,
        max_waiting: int | None = None, observe: Callable[[StepReport], None] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.drafter = model, fit(drafter, model, "auto")
        self.max_rows, self.max_waiting, self.observe = max_rows, max_waiting, observe
        self.verifier = open_verifier(model, () if drafter is None else drafter.taps)
        self.devices: dict[str, Device] = {}
        self.failure: BaseException | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._queue: deque[Run] = deque()
        self._active: list[Run] = []
        self._steps: list[tuple[str, Draft, Future[dict[str, Any]]]] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._drive, name="dllm verifier", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def submit(
        self, prompt: Any, *, chat: bool | None = None, repetition: int = 0,
        deadline: float | None = None, **arguments: Any,
    ) -> Run:  # fmt: skip
        """Ask for an answer; see `dllm.Session.submit`.  ``arguments``: see `dllm.speculate`."""
        for name in NOT_HERE:
            if arguments.pop(name, None):
                raise ConfigError(f"{self.model.name} is autoregressive: it has no {name}")
        ids = encode(self.model, prompt, chat)
        settled = self._settled(self.drafter, arguments)
        settled.room(len(ids))
        tokenizer = self.model.tokenizer
        decode: Any = lambda _: ""  # noqa: E731
        if tokenizer is not None:
            decode = partial(tokenizer.decode, skip_special_tokens=True)
        growing = GrowingText(decode, settled.config.stop_strings)
        run = Run(self, settled, ids, repetition, deadline, growing)
        with self._changed:
            if self._closed:
                raise ConfigError("the session is closed: open another one")
            room = max(0, self.max_rows - len(self._active))
            if self.max_waiting is not None and len(self._queue) >= self.max_waiting + room:
                raise QueueFullError(f"{len(self._queue)} requests wait already: try again later")
            self._queue.append(run)
            self._changed.notify()
        return run

    def infill(self, *_: Any, **__: Any) -> Run:
        raise ConfigError(f"{self.model.name} is autoregressive: it cannot fill holes")

    def _settled(self, drafter: Drafter | None, arguments: dict[str, Any]) -> Settled:
        for name in arguments:
            if name not in ARGUMENTS:
                raise UnknownNameError("argument of an autoregressive model", name, ARGUMENTS)
        defaults = self.model.generation_defaults
        known = {name: defaults[name] for name in ARGUMENTS if name in defaults}
        made = Settled(self.model, drafter, GenerationConfig.build(known, arguments))
        made.verifier = self.verifier
        return made

    # -- texts of devices -----------------------------------------------------------------------

    def open(self, prompt: IntArray, repetition: int, arguments: dict[str, Any]) -> Future[Any]:
        """A text that a device drafts for: its ``sid``, and what a drafter has to know."""
        settled, future = self._settled(None, arguments), _promise()
        limit = len(prompt) + settled.room(len(prompt))

        def begin() -> None:
            while len(self.devices) >= MOST_TEXTS:
                self._forget(min(self.devices, key=lambda sid: self.devices[sid].seen))
            sid = uuid.uuid4().hex
            self.devices[sid] = Device(settled.start(prompt, repetition))
            future.set_result(
                {"sid": sid, "vocab_size": self.model.facts.vocab_size, "limit": limit,
                 "stop_ids": list(self.model.facts.stop_token_ids)}
            )  # fmt: skip

        self._do(begin, future)
        return future

    def step(self, sid: str, base: int, tokens: Any, parents: Any) -> Future[dict[str, Any]]:
        """Verify a draft after ``base`` tokens: what of it is accepted, and one token more."""
        future = _promise()

        def take() -> None:
            device = self.devices[sid]
            run = device.speculation
            device.seen = time.monotonic()
            room = run.text.limit - len(run.text.tokens) - 1
            if any(waiting == sid for waiting, _, _ in self._steps):
                raise ConfigError("a draft of this text is being verified: wait for the answer")
            reply = {"base_len": base, "tokens": tokens, "parents": parents}
            size = self.model.facts.vocab_size
            try:
                draft = checked(reply, len(run.text.tokens), Budget(LONGEST_DRAFT, room), size)
            except ValueError as error:
                raise PromptError(f"the draft does not fit the text: {error}") from None
            self._steps.append((sid, run.checked(draft), future))

        self._do(take, future)
        return future

    def forget(self, sid: str) -> Future[Any]:
        """The device is done with its text."""
        future = _promise()

        def end() -> None:
            self._forget(sid)
            future.set_result({"sid": sid})

        self._do(end, future)
        return future

    def _forget(self, sid: str) -> None:
        self.devices.pop(sid).speculation.close()

    def _do(self, work: Callable[[], None], future: Future[Any] | None = None) -> None:
        """Have ``work`` done by the verifier's thread."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:
                if future is None:
                    raise
                future.set_exception(error)

        with self._changed:
            if self._closed and future is not None:
                future.set_exception(CancelledError("the session was closed"))
                return
            self._inbox.append(guarded)
            self._changed.notify()

    # -- the verifier's thread ------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            while True:
                with self._changed:
                    if not (self._inbox or self._active or self._queue or self._closed):
                        self._changed.wait(IDLE_SECONDS)
                    work = [self._inbox.popleft() for _ in range(len(self._inbox))]
                for one in work:
                    one()
                if self._closed:
                    return
                self._expire()
                self._admit()
                if self._active or self._steps:
                    self._round()
        except BaseException as error:
            self.failure = error
        finally:
            self._end()

    def _expire(self) -> None:
        now = time.perf_counter()
        for run in [*self._queue, *self._active]:
            if run.deadline is not None and now - run.submitted > run.deadline:
                self._drop(run, DeadlineError(f"not answered within {run.deadline:g} s"))

    def _drop(self, run: Run, error: BaseException) -> None:
        """Let a request go that has no result."""
        if run.done:
            return
        if run in self._active:
            self._active.remove(run)
        elif run in self._queue:
            self._queue.remove(run)
        if run.speculation is not None:
            run.speculation.close()
        run.error = error
        run.woken()

    def _admit(self) -> None:
        while self._queue and len(self._active) < self.max_rows:
            run = self._queue.popleft()
            run.queue_seconds = time.perf_counter() - run.submitted
            try:
                run.speculation = run.settled.start(run.prompt, run.row)
            except Exception as error:
                run.error = error
                run.woken()
                continue
            self._active.append(run)

    def _round(self) -> None:
        began = time.perf_counter()
        steps, self._steps = self._steps, []
        texts = [run.speculation for run in self._active if run.speculation is not None]
        drafts = self._drafts(texts)
        texts += [self.devices[sid].speculation for sid, _, _ in steps]
        drafts += [draft for _, draft, _ in steps]
        forward = time.perf_counter()
        scored = self._score(texts, drafts)
        verified = time.perf_counter() - forward
        emitted = []
        for text, draft, rows in zip(texts, drafts, scored, strict=True):
            clock = RoundClock(attempted=len(draft) > 0, verify=verified)
            outcome = rows if isinstance(rows, Exception) else text.take(draft, rows, clock)
            emitted.append(outcome)
            text.seconds += time.perf_counter() - began
        for run, tokens in zip(list(self._active), emitted, strict=False):
            self._tell(run, tokens)
        for (sid, _, future), tokens in zip(steps, emitted[len(emitted) - len(steps) :],
                                            strict=True):  # fmt: skip
            self._answer(sid, future, tokens)
        self._report(texts, drafts, emitted, time.perf_counter() - began, verified)

    def _drafts(self, texts: list[Speculation]) -> list[Draft]:
        """A draft for every text that is written here."""
        drafts, work, asked = [EMPTY] * len(texts), [], []
        for i, text in enumerate(texts):
            budget = text.budget()
            if budget is not None and text.drafting is not None:
                work.append((text.drafting, text.text.prefix, budget))
                asked.append(i)
        if work and self.drafter is not None:
            for i, draft in zip(asked, self.drafter.propose_all(work), strict=True):
                drafts[i] = texts[i].checked(draft)
        return drafts

    def _score(
        self, texts: list[Speculation], drafts: list[Draft]
    ) -> list[Scored] | list[Scored | Exception]:
        """One forward; if it fails, one for each text, so that only the culprit fails."""
        work = [(text.text, draft) for text, draft in zip(texts, drafts, strict=True)]
        scored: list[Scored | Exception] = []
        try:
            return self.verifier.score(work)
        except Exception as error:
            if len(work) == 1:
                scored.append(error)
                return scored
        for one in work:
            try:
                scored += self.verifier.score([one])
            except Exception as error:
                scored.append(error)
        return scored

    def _tell(self, run: Run, tokens: list[int] | Exception) -> None:
        """What a round did to a request that is written here."""
        if isinstance(tokens, Exception):
            self._drop(run, tokens)
            return
        assert run.speculation is not None
        piece = run.growing.feed(tokens)
        if run.speculation.finish_reason is None:
            run.put(Written(piece, tokens=len(tokens)))
            return
        waited = run.queue_seconds or 0.0
        run.outcome = replace(run.settled.result(run.speculation), queue_seconds=waited)
        self._active.remove(run)
        run.speculation.close()
        run.put(Written(piece + run.growing.end(run.outcome.text), result=run.outcome))

    def _answer(self, sid: str, future: Future[Any], tokens: list[int] | Exception) -> None:
        """What a round did to a device's text; a text that is complete is forgotten."""
        if isinstance(tokens, Exception):
            future.set_exception(tokens)
            self._forget(sid)
            return
        run = self.devices[sid].speculation
        future.set_result({
            "base_len": len(run.text.tokens), "tokens": tokens,
            "accepted": run.rounds[-1].accepted, "finish_reason": run.finish_reason,
        })  # fmt: skip
        if run.finish_reason is not None:
            self._forget(sid)

    def _report(
        self, texts: list[Any], drafts: list[Draft], emitted: list[Any], seconds: float,
        forward: float,
    ) -> None:  # fmt: skip
        if self.observe is None:
            return
        written = sum(len(tokens) for tokens in emitted if not isinstance(tokens, Exception))
        fed = len(texts) + sum(map(len, drafts))
        self.observe(
            StepReport(
                seconds=seconds, forward_seconds=forward, rows=len(texts), positions=fed,
                committed=written, remasked=0, running=self.running, waiting=self.waiting,
            )
        )  # fmt: skip

    def _end(self) -> None:
        """Nothing is left behind."""
        with self._changed:
            self._closed = True
            left = [self._inbox.popleft() for _ in range(len(self._inbox))]
        for one in left:  # whoever waits for these is answered
            with suppress(Exception):
                one()
        error = self.failure or CancelledError("the session was closed")
        for run in [*self._active, *self._queue]:
            self._drop(run, error)
        for _, _, future in self._steps:
            future.set_exception(error)
        for sid in list(self.devices):
            self._forget(sid)

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the session; ``drain``: when what runs and waits is finished."""
        until = None if timeout is None else time.monotonic() + timeout
        while drain and (self._active or self._queue) and self._thread.is_alive():
            if until is not None and time.monotonic() > until:
                break
            time.sleep(0.01)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()


def _promise() -> Future[Any]:
    """What a request waits for.  One that gives up cannot cancel it, or the verifier's thread would
    fail where it answers."""
    future = Future[Any]()
    future.set_running_or_notify_cancel()
    return future
