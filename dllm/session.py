"""Continuous batching inside a program: submit prompts at any time, from any thread or task.

One thread drives the engine.  Requests join it as soon as there is room and leave when they are
finished, cancelled or late; who else is there makes no difference to what a request gets.
"""

import itertools
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, Self, Unpack

from .cache import compose
from .core.config import GenerationConfig, SessionArguments, SessionConfig
from .core.declared import ANSWER, MACHINE, VERIFIER
from .core.errors import (
    FAILURES,
    CancelledError,
    ConfigError,
    DllmError,
    QueueFullError,
    check_whole,
    one_line,
    short,
)
from .engine import Engine
from .engine.work import Work
from .models import DiffusionModel, load
from .request.request import Request
from .request.requests import one_request, recipe_for
from .runtime.events import Progress, events
from .runtime.handle import Handle
from .runtime.scheduler import Scheduler

Make = Callable[[Any, Any, dict[str, Any]], Request]  # of a prompt, a text to fill, and how
BLOCK = 32  # positions that graphs are captured for, where a model has no blocks of its own
IDLE_SECONDS = 0.2  # between two looks at deadlines while nothing runs


@dataclass(frozen=True)
class StepReport:
    """One step of the engine, for whoever watches.  ``seconds`` of the whole step and of its
    forwards with the statistics; ``positions`` fed to the model, ``committed`` and ``remasked``
    positions of all ``rows``; ``running`` and ``waiting`` requests after it."""

    seconds: float
    forward_seconds: float
    rows: int
    positions: int
    committed: int
    remasked: int
    running: int
    waiting: int


class Session:
    """An engine with a thread of its own, to which requests are submitted.

    >>> with dllm.Session("nano", cache="dual") as session:
    ...     handles = [session.submit(f"What is {n} + 5?") for n in range(10, 40)]
    ...     texts = [handle.result().text for handle in handles]

    ``model``: as for `dllm.generate`, or as the verifier of `dllm.speculate`; ``how``: see
    `dllm.core.config.SessionConfig`.  ``observe`` is called with a `StepReport` after every step,
    in the engine's thread.  One that raises is warned about, and not called again.
    """

    def __init__(
        self,
        model: Any,
        *,
        observe: Callable[[StepReport], None] | None = None,
        **how: Unpack[SessionArguments],
    ) -> None:
        self.model, config = load(model), SessionConfig(**how)
        self.max_waiting, self.observe = config.max_waiting, observe
        engine, self._make = _engine_for(self.model, config)
        engine.prefix_cache_tokens(config.prefix_cache_tokens)
        self._scheduler = Scheduler(engine)
        self._handles: dict[Request, Handle] = {}
        self._inbox: deque[tuple[str, Handle]] = deque()  # what other threads want of the engine's
        self._wake = threading.Condition()
        self._numbers = itertools.count()
        self._failure: BaseException | None = None
        self._forward_seconds = 0.0
        self._state = "open"  # then "draining", "closed"
        of = weakref.ref(self), self._wake
        self._thread = threading.Thread(target=_drive, args=of, name="dllm session", daemon=True)
        self._thread.start()

    # -- requests -------------------------------------------------------------------------------

    def submit(
        self, prompt: Any, *, deadline: float | None = None, max_events: int = 64, **how: Any
    ) -> Handle:
        """Ask for an answer to one prompt; returns at once.

        ``prompt``, and in ``how`` ``sampler``, ``chat``, ``trace``, ``config`` and the fields of a
        `GenerationConfig`: as for `dllm.generate`; for a verifier those of `dllm.speculate` that
        belong to a text, with a ``drafter`` of its own.  ``repetition``: how many times the prompt
        was answered before, for new noise.  ``deadline``: seconds from now after which the request
        fails with `DeadlineError`.  ``max_events``: see `Handle`.  Raises what is wrong with the
        request, and `QueueFullError`.
        """
        return self._enqueue(prompt, None, how, deadline, max_events)

    def infill(
        self, text: Any, *, prompt: Any = None, deadline: float | None = None,
        max_events: int = 64, **how: Any,
    ) -> Handle:  # fmt: skip
        """Ask for the holes of a text to be filled, see `dllm.infill`; returns at once."""
        return self._enqueue(prompt, text, how, deadline, max_events)

    def _enqueue(
        self, prompt: Any, text: Any, how: dict[str, Any], deadline: float | None, max_events: int
    ) -> Handle:
        check_whole("max_events", max_events)
        if deadline is not None and not (isinstance(deadline, Real) and deadline == deadline):
            raise ConfigError(f"deadline is a number of seconds from now, not {short(deadline)}")
        named = how.keys() | getattr(how.get("config"), "model_fields_set", ())
        for name in (*GenerationConfig.fields(MACHINE), "cache"):
            if name in named:
                raise ConfigError(f"{name} belongs to the session, not to a request: pass it there")
        request = self._make(prompt, text, how)
        self._scheduler.engine.must_fit(request.recipe, request.positions)
        with self._wake:
            if self._state != "open" or not self._thread.is_alive():  # as after a fork
                raise ConfigError("the session is closed, or another process's: open another one")
            waiting, most = self.waiting, self.max_waiting
            full = most is not None and waiting >= most + self._scheduler.engine.room
            if full and not request.recipe.outside:
                raise QueueFullError(
                    f"{waiting} requests wait already (max_waiting={self.max_waiting}): "
                    "try again later"
                )
            request.index, request.deadline = next(self._numbers), deadline
            request.submitted = time.perf_counter()
            handle = Handle(self.model, request, max_events, self._cancel)
            self._inbox.append(("submit", handle))
            self._wake.notify()
        return handle

    def wake(self) -> None:
        """Look at every request again: one may be ready that waited for something from outside."""
        with self._wake:
            self._wake.notify()

    def _cancel(self, handle: Handle) -> None:
        with self._wake:
            if not handle.done and self._state != "closed":
                self._inbox.append(("cancel", handle))
                self._wake.notify()

    # -- what goes on ---------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that are being decoded."""
        return sum(not request.recipe.outside for request in list(self._scheduler.running.values()))

    @property
    def waiting(self) -> int:
        """Requests that were submitted and not admitted yet."""
        submitted = sum(what == "submit" for what, _ in list(self._inbox))
        return len(self._scheduler.waiting) + submitted

    @property
    def failure(self) -> BaseException | None:
        """What ended the engine's thread, if something has: the session takes no more requests."""
        return self._failure

    @property
    def positions_used(self) -> int:
        """Positions of the pool of keys and values that requests own."""
        return self._scheduler.engine.used

    @property
    def positions(self) -> int:
        """Positions that the pool may hold; 0 for a cache that stores nothing."""
        engine = self._scheduler.engine
        return (engine.positions or 0) if engine.stores else 0

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """End the session: no more requests are taken.  What runs or waits is finished first, or
        cancelled, if ``drain`` is False or ``timeout`` seconds have passed."""
        with self._wake:
            if self._state == "open":
                self._state = "draining"
            if not drain:
                self._state = "closed"
            self._wake.notify()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._wake:
                self._state = "closed"
                self._wake.notify()
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(drain=kind is None)

    # -- the engine's thread --------------------------------------------------------------------

    def _idle(self) -> bool:
        return self._state == "open" and not self._inbox and not self._scheduler.busy

    def _advance(self) -> bool:
        """A step; False when the session is over."""
        try:
            if self._read_inbox():
                began = time.perf_counter()
                progress = self._scheduler.advance()
                for request, event in events(progress):
                    self._handles[request]._put(event)
                for request, _ in progress:
                    if request.done:
                        self._close_handle(request)
                self._report(progress, time.perf_counter() - began)
                return True
        except BaseException as error:  # not one request's: nobody may wait for ever
            self._failure = error
        self._end()
        return False

    def _read_inbox(self) -> bool:
        """Take what other threads want, and let go who is late; False when the session is over."""
        with self._wake:
            changed = bool(self._inbox)
            while self._inbox:
                what, handle = self._inbox.popleft()
                if what == "submit":
                    self._handles[handle._request] = handle
                    self._scheduler.add(handle._request)
                elif not handle.done:
                    self._scheduler.cancel(handle._request)
                    self._close_handle(handle._request)
            if self._state == "closed" or not (self._scheduler.busy or changed):
                return False
        for request in self._scheduler.expire():
            self._close_handle(request)
        return True

    def _close_handle(self, request: Request) -> None:
        handle = self._handles.pop(request, None)
        if handle is not None:
            request.row = request.canvas = None
            handle._close()

    def _report(self, progress: Progress, seconds: float) -> None:
        steps = [step for _, step in progress if step is not None]
        if self.observe is None or not steps:
            return
        spent, before = self._scheduler.engine.forward_seconds, self._forward_seconds
        self._forward_seconds = spent
        report = StepReport(
            seconds=seconds, forward_seconds=spent - before, rows=len(steps),
            positions=sum(step.positions for step in steps),
            committed=sum(len(step.decision.committed) for step in steps),
            remasked=sum(len(step.decision.remasked) for step in steps),
            running=self.running, waiting=self.waiting,
        )  # fmt: skip
        try:
            self.observe(report)
        except FAILURES as error:  # it says nothing about any request
            self.observe = None
            what = f"{type(error).__name__}: {one_line(error)}"
            message = f"observe raised {what}; it is not called again"
            warnings.warn(message, RuntimeWarning, stacklevel=1)

    def _end(self) -> None:
        """Nothing is left behind: no row, no slot, nobody who waits for ever."""
        with self._wake:
            self._state = "closed"
            left = [handle for what, handle in self._inbox if what == "submit"]
            self._inbox.clear()
        if self._failure is not None:
            for request in self._handles:
                request.error = request.error or self._failure
        self._scheduler.close()
        for handle in [*self._handles.values(), *left]:
            if not handle._request.done:
                handle._request.error = self._failure or CancelledError("the session was closed")
            handle._close()
        self._handles.clear()


def _drive(of: weakref.ref[Session], wake: threading.Condition) -> None:
    """What the thread of a session does; one that nobody holds while it is idle is collected."""
    while True:
        with wake:
            session = of()
            idle = session is not None and session._idle()
            if idle:
                session = None
                wake.wait(IDLE_SECONDS)
        if not idle and (session is None or not session._advance()):
            return


def _engine_for(model: DiffusionModel, config: SessionConfig) -> tuple[Work[Any, Any], Make]:
    """The engine of a session, and what makes its requests.  A model without a mask token
    verifies, and so does one that can, where a drafter is named."""
    verifies = model.facts.mask_token_id is None or config.drafter is not None
    theirs = SessionConfig.fields(VERIFIER) if verifies else SessionConfig.fields(ANSWER, MACHINE)
    for name in config.model_fields_set - theirs.keys():
        if getattr(config, name) != SessionConfig.model_fields[name].default:
            kinds = ("diffusion", "autoregressive")
            other, own = kinds if verifies else kinds[::-1]
            raise ConfigError(
                f"{name} is for {other} models, and {model.name} is decoded as {own}: drop {name}"
            )
    most = config.max_positions or config.max_batch_size * model.facts.context_length
    return (_verifying if verifies else _masked)(model, config, most)


def _masked(model: DiffusionModel, config: SessionConfig, most: int) -> tuple[Work[Any, Any], Make]:
    sampler, length = config.sampler, config.length
    engine = Engine(
        model, compose(config.cache or "none", model.family.name), most=most,
        slots=config.max_positions if config.cuda_graphs else None,  # not to outgrow graphs
        max_batch_size=config.max_batch_size, max_batch_tokens=config.max_batch_tokens,
        cuda_graphs=config.cuda_graphs,
    )  # fmt: skip
    recipe = recipe_for(model, sampler, None, {} if length is None else {"length": length})
    if config.sampler is not None:  # what every request that names none would be refused for
        engine.check(recipe)
    make = partial(one_request, model, sampler, length)
    if config.cuda_graphs:
        _capture_graphs(engine, make, config.max_batch_size)
    return engine, make


def _capture_graphs(engine: Engine, make: Make, most: int) -> None:
    """Decode 1 to ``most`` rows, a block of each: these steps are captured before any request."""
    facts = engine.model.facts
    block = facts.block_length or BLOCK
    how = {"sampler": "llada(steps=4)", "block_length": block, "max_new_tokens": block,
           "eos_policy": "none"}  # fmt: skip
    with suppress(DllmError):  # what does not fit or fails here is captured when it is met
        request = make([int(facts.mask_token_id == 0)], None, how)
        for count in range(1, most + 1):
            for _ in engine.run([request.make() for _ in range(count)], request.recipe):
                pass


def _verifying(
    model: DiffusionModel, config: SessionConfig, most: int
) -> tuple[Work[Any, Any], Make]:
    from .drafting import recipe as drafted
    from .drafting.engine import SpeculativeEngine

    recipe = drafted.of_session(model, config)
    engine = SpeculativeEngine(
        model, target_layer_ids=recipe.target_layer_ids, exact=config.exact, most=most,
        max_batch_size=config.max_batch_size, max_batch_tokens=config.max_batch_tokens,
    )  # fmt: skip
    engine.check(recipe)
    own = {"drafter": recipe.drafter, "rule": config.rule, "controller": recipe.controller}
    return engine, partial(drafted.one_request, model, own, config.vocabulary)
