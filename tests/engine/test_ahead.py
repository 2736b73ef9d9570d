"""Forwards that are launched before the host looks at what the former step did."""

import time
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest

import dllm
from dllm import cache as caches
from dllm.engine import Engine, forward, work
from dllm.request.requests import recipe_for, requests_for
from dllm.runtime.scheduler import Scheduler

from ..thin import some

PROMPTS = [[5, 6, 7 + i, *range(8, 10 + i % 5)] for i in range(8)]


def scheduled(
    model: dllm.DiffusionModel, sampler: str, cache: str, prompts: list[list[int]] = PROMPTS,
    most: int | None = None, **how: Any,
) -> Scheduler:  # fmt: skip
    recipe = recipe_for(model, sampler, None, {"max_new_tokens": 16, **how})
    requests = requests_for(model, recipe, prompts, None)
    engine = Engine(model, caches.compose(cache), max_batch_size=most)
    return Scheduler.of(engine, requests)


def followed(scheduler: Scheduler) -> tuple[list[Any], dict[int, list[Any]], int]:
    """Results, the events of each row, forwards."""
    events: dict[int, list[Any]] = {}
    results = {}
    for event in scheduler.events():
        events.setdefault(event.row, []).append(
            (event.step, event.committed, event.drafts, event.remasked, event.window, event.text,
             event.tokens, event.tail, event.edits)
        )  # fmt: skip
        if event.result is not None:
            r = event.result
            results[event.row] = r.text, r.tokens, r.order, r.nfe, r.computed, r.finish_reason
    return [results[i] for i in sorted(results)], events, scheduler.engine.forward.count  # type: ignore[attr-defined]


WAYS = [
    ("threshold", "dual", {}),
    ("localleap", "none", {"temperature": 0.7, "seed": 3}),
    ("remdm+fixed(2)", "none", {}),
    ("llada", "dual", {"steps": 40, "block_length": 8}),  # steps that rest
    ("lopa", "dual", {}),
]


@pytest.mark.parametrize(("way", "fills"), some(product(WAYS, [1000, 1]), 2))
def test_texts_events_and_forwards_are_the_same(
    tiny: dllm.DiffusionModel, way: tuple[str, str, dict[str, Any]], fills: int
) -> None:
    """All rows in one group; and in two, which take a forward each and are joined later."""
    sampler, cache, how = way
    most = None if fills > 1 else 6
    plain = followed(scheduled(tiny, sampler, cache, most=most, **how))
    scheduler = scheduled(tiny, sampler, cache, most=most, **how)
    scheduler.engine.overlaps = True
    with patch.object(work, "FILLS", fills):
        ahead = followed(scheduler)
    assert ahead[0] == plain[0]
    assert ahead[1] == plain[1]
    assert ahead[2] == plain[2] if fills > 1 else ahead[2] > plain[2]
    assert not scheduler.engine._flights and not scheduler.engine.live


def test_a_row_that_goes_while_its_forward_runs_is_not_decided(tiny: dllm.DiffusionModel) -> None:
    plain = followed(scheduled(tiny, "threshold", "dual"))
    scheduler = scheduled(tiny, "threshold", "dual")
    scheduler.engine.overlaps = True
    requests = list(scheduler.waiting)
    scheduler.advance()
    assert scheduler.engine._flights
    gone = requests[2].canvas
    assert gone is not None and gone.nfe == 1  # the first call waits for its own forward
    before = gone.tokens.copy()
    scheduler.cancel(requests[2])
    while scheduler.busy:
        scheduler.advance()
    assert (gone.tokens == before).all()
    for i, request in enumerate(requests):
        assert (request.result is None) == (i == 2)
        assert i == 2 or request.result.tokens == plain[0][i][1]


def test_a_forward_that_fails_under_way_runs_again(tiny: dllm.DiffusionModel) -> None:
    plain = followed(scheduled(tiny, "threshold", "dual"))
    scheduler = scheduled(tiny, "threshold", "dual")
    scheduler.engine.overlaps = True
    wait, calls = forward.PendingAnswers.wait, list[int]()

    def failing(flight: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device says no")
        return wait(flight)

    with patch.object(forward.PendingAnswers, "wait", failing):
        assert followed(scheduler)[:2] == plain[:2]


class Device:
    """A device with a clock: it computes one forward after the other, ``seconds`` per position,
    while the host's time goes on.  The host's time is that of its thread, without the numbers that
    this machine computes in the device's place."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.engine, self.seconds = engine, seconds
        self.spared = self.waited = self.free = self.busy = 0.0

    def now(self) -> float:
        return time.thread_time() - self.spared + self.waited

    def spare(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **how)
            finally:
                self.spared += time.thread_time() - began

        return call

    def run(self, scheduler: Scheduler) -> tuple[float, float, float]:
        """Seconds in all, of the host, of the device."""
        device, launch, wait = self, self.engine.forward.launch, forward.PendingAnswers.wait
        ready: dict[int, float] = {}

        def launched(jobs: Any) -> Any:
            flight = launch(jobs)
            takes = self.seconds * sum(job.size for job in jobs)
            self.free = max(self.free, self.now()) + takes
            self.busy += takes
            ready[id(flight)] = self.free
            return flight

        def waiting(flight: Any) -> Any:
            device.waited += max(0.0, ready[id(flight)] - device.now())
            return wait(flight)

        own = self.engine.forward
        backbone, statistics = self.spare(own._backbone), self.spare(forward.token_statistics)
        with patch.object(own, "launch", launched), \
             patch.object(forward.PendingAnswers, "wait", waiting), \
             patch.object(own, "_backbone", backbone), \
             patch.object(forward, "token_statistics", statistics):  # fmt: skip
            began = self.now()
            for _ in scheduler.events():
                pass
            whole = self.now() - began
        return whole, whole - self.waited, self.busy


@pytest.mark.slow  # simulates a device: seconds for each ratio
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_a_step_takes_the_longer_of_host_and_device(
    tiny: dllm.DiffusionModel, ratio: float
) -> None:
    """32 rows in two groups; ``ratio``: how long the device takes, of the host's time."""
    prompts = [[5, 6, 7, *range(8, 10 + i % 7)] for i in range(32)]

    def run(seconds: float, overlaps: bool) -> tuple[float, float, float]:
        scheduler = scheduled(tiny, "fixed(1)", "dual", prompts, max_new_tokens=32)
        scheduler.engine.overlaps = overlaps
        engine: Any = scheduler.engine
        return Device(engine, seconds).run(scheduler)

    with patch.object(work, "FILLS", 32):
        _, host, device = run(1e-6, True)
        seconds = 1e-6 * ratio * host / device
        # Of three runs: a step lasts max(host, device), whose mean exceeds the larger of both means
        # by as much as other programs make the host's time vary.
        tries = [run(seconds, True) for _ in range(3)]
        assert min(whole / max(host, device) for whole, host, device in tries) <= 1.1
        whole, host, device = run(seconds, False)
        assert whole > 0.95 * (host + device)
