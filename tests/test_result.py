"""Results as plain data, and what their seconds are."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import LlamaModel
from typer.testing import CliRunner

import dllm
from dllm.cli.app import app
from dllm.engine import memory
from dllm.runtime.result import Result

from .settings import every_sampler
from .thin import some

PROMPT = "What is 4 + 5?"
LONG = "Tom has 23 apples. Tom buys 12 more. How many apples does Tom have?"

LONGER: dict[str, Any] = {"max_new_tokens": 32, "sampler": "threshold", "block_length": 8}


def generated(**how: Any) -> Result:
    return dllm.generate("nano", PROMPT, max_new_tokens=16, **how)


def in_session() -> Result:
    with dllm.Session("nano", cache="dual") as session:
        return session.submit(PROMPT, trace=True, max_new_tokens=16).result(timeout=60)


KINDS: dict[str, Callable[[], Result]] = {
    "plain": generated,
    "traced": lambda: generated(trace=True),
    "candidates": lambda: generated(trace=True, top_candidates=600, min_new_tokens=8),
    "sampled": lambda: generated(trace=True, temperature=2.0, top_k=3, top_candidates=5),
    "revised": lambda: generated(trace=True, sampler="remdm"),
    "guided": lambda: generated(trace=True, cfg_scale=1.0, cache="dual"),
    "layered": lambda: generated(trace=True, cache="elastic", block_length=8),
    "branches": lambda: generated(trace=True, sampler="lopa(localleap, k=3)"),
    "infill": lambda: dllm.infill("nano", "4 + 5 =[[2]]9.", trace=True),
    "constrained": lambda: generated(trace=True, constraints={8: "The end"}),
    "session": in_session,
    "speculated": lambda: dllm.speculate("nano-ar", "nano", LONG, max_new_tokens=12),
    "tree": lambda: dllm.speculate("nano-ar", "cacheback", LONG, max_new_tokens=12),
    "lossy": lambda: dllm.speculate(
        "nano-ar", "nano", LONG, rule="apd", search="apd", max_new_tokens=12
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_result_goes_through_strict_json(kind: str) -> None:
    result = KINDS[kind]()
    data = result.to_dict()
    again = json.loads(json.dumps(data, allow_nan=False))
    assert again["kind"] == type(result).__name__
    for name, value in vars(result).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, again[name])
        elif name not in ("trace", "rounds"):
            assert again[name] == value, name
    assert (again["trace"] is None) == (result.trace is None)
    if isinstance(result, dllm.SpeculativeResult):
        assert again["rounds"] == [asdict(stats) for stats in result.rounds]


def test_candidates_are_those_that_can_be_proposed() -> None:
    """Of 600 asked for: neither what a filter left out nor what is banned there."""
    trace = KINDS["sampled"]().trace
    assert trace is not None
    candidates = [best for step in trace.steps for _, best in step.candidates]
    assert candidates and all(math.isfinite(q) for best in candidates for _, q in best)


def test_numbers_that_json_does_not_have() -> None:
    result = generated()
    result.logprobs[0] = -np.inf
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert data["logprobs"][0] is None and data["logprobs"][1] is not None


def test_results_are_compared_as_objects() -> None:
    one, other = generated(), generated()
    assert one != other and [one, other].index(other) == 1 and len({one, other}) == 2
    seen = [dllm.step("nano", "4 + 5 =[[2]]9.") for _ in range(2)]
    assert seen.index(seen[1]) == 1
    events = list(dllm.stream("nano", PROMPT))
    assert events[0] == events[0] and len({*events}) == len(events)


def test_a_trace_is_written_to_a_file(tmp_path: Path) -> None:
    trace = KINDS["candidates"]().trace
    assert trace is not None
    trace.save(tmp_path / "t.json")
    again = json.loads((tmp_path / "t.json").read_text())
    assert again == json.loads(json.dumps(trace.to_dict())) and len(again["steps"]) > 1


class Clock:
    """Stands still but for forwards, which take a second each."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock, run = Clock(), LlamaModel.forward

    def forward(*given: Any, **named: Any) -> Any:
        clock.now += 1
        return run(*given, **named)

    monkeypatch.setattr(LlamaModel, "forward", forward)
    monkeypatch.setattr("time.perf_counter", clock)
    yield clock


def seconds_are_forwards(result: Result, before: float = 0.0) -> None:
    assert (result.seconds, result.queue_seconds) == (result.nfe, before)
    assert result.tokens_per_second == result.decided / result.nfe


def test_seconds_of_one_text(clock: Clock) -> None:
    seconds_are_forwards(dllm.generate("nano", PROMPT))
    seconds_are_forwards(dllm.infill("nano", "4 + 5 =[[2]]9."))
    seconds_are_forwards(dllm.speculate("nano-ar", "prompt_lookup", PROMPT, max_new_tokens=16))


def test_seconds_do_not_count_what_a_reader_does(clock: Clock) -> None:
    result = None
    for event in dllm.stream("nano", PROMPT):
        clock.now += 1000
        result = event.result
    assert result is not None
    seconds_are_forwards(result)
    for round_ in dllm.stream_speculate("nano-ar", "prompt_lookup", PROMPT, max_new_tokens=16):
        clock.now += 1000
        result = round_.result
    assert result is not None
    seconds_are_forwards(result)


def test_seconds_in_a_batch(clock: Clock) -> None:
    """Rows of a step share its second; who waits for a row does not count the wait."""
    together = dllm.generate("nano", [PROMPT, LONG], **LONGER)
    for result in together:
        seconds_are_forwards(result)
    assert together[0].nfe != together[1].nfe
    queued = dllm.generate("nano", [PROMPT, LONG], max_batch_size=1, **LONGER)
    seconds_are_forwards(queued[0])
    seconds_are_forwards(queued[1], before=queued[0].nfe)
    for k, result in dllm.as_completed("nano", [PROMPT, LONG], **LONGER):
        clock.now += 1000
        assert result.seconds == together[k].seconds


def test_seconds_of_micro_batches(clock: Clock) -> None:
    """A step in two forwards takes both rows two seconds."""
    results = dllm.generate("nano", [PROMPT, PROMPT], max_new_tokens=32, max_batch_tokens=60)
    assert [result.seconds for result in results] == [2 * result.nfe for result in results]


def test_seconds_in_a_session(clock: Clock) -> None:
    with dllm.Session("nano") as session:
        handles = [session.submit(text, **LONGER) for text in (PROMPT, LONG)]
        results = [handle.result(timeout=60) for handle in handles]
    for result in results:
        assert result.seconds >= result.nfe and result.queue_seconds >= 0
    alone = dllm.generate("nano", LONG, **LONGER)
    assert results[1].nfe == alone.nfe


@pytest.mark.parametrize("how", [[], ["--watch"]])
def test_seconds_of_the_command_line(clock: Clock, how: list[str]) -> None:
    outcome = CliRunner().invoke(app, ["generate", PROMPT, "--json", *how])
    assert not outcome.exit_code, outcome.stderr
    record = json.loads(outcome.stdout)
    assert record["seconds"] == record["nfe"]


WAYS: tuple[dict[str, Any], ...] = ({}, {"steps": 24}, {"block_length": 4, "steps": 6})


@pytest.mark.parametrize(
    "sampler", some([*every_sampler(), "remdm", "remdm(n=3, start=0.2)+blocks(8)"], 8)
)
def test_a_token_was_decided_in_a_step_that_took_a_forward(
    tiny: dllm.DiffusionModel, noisy: dllm.DiffusionModel, sampler: str
) -> None:
    """Its last commit, with samplers that take tokens back, too.  A step without a forward decides
    nothing; only Dream's schedule has some."""
    tried = 0
    for model, how in product((tiny, noisy), WAYS):
        if model is noisy and tried:
            break
        try:
            result = dllm.generate(model, [5, 6, 7], sampler=sampler, max_new_tokens=8,
                                   trace=True, **how)  # fmt: skip
        except dllm.ConfigError:
            continue
        tried += 1
        assert result.trace is not None
        commits = {(step.step, at) for step in result.trace.steps for at, _, _ in step.commits}
        decided = {(step, 3 + i) for i, step in enumerate(result.order) if step >= 0}
        assert decided <= commits, how
        if "dream" not in sampler:
            assert max(result.order) < result.nfe, how
    assert tried or "s2d2" in sampler


def test_peak_memory_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no ``resource``, and a peak of 0 was said."""
    monkeypatch.setattr(memory, "resource", None)
    info = SimpleNamespace(rss=3 << 20, peak_wset=7 << 20)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: info)
    assert memory.PeakMemory(torch.device("cpu")).peak() == 7 << 20
