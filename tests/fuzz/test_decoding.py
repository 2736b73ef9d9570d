"""A batch is its rows alone, and threads do not disturb each other, in random ways of decoding.

The seeds of a test are in its name: ``case(seed, model)`` makes the case again.  The default run
takes a few; ``-m slow`` takes 10,000.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import dllm

from .decoding import Outcome, alone, case, together

FAST, MANY = 80, 10_000  # cases
BATCH = 20  # cases of a test
THREADS = 8


def groups(first: int, last: int) -> list[range]:
    return [range(at, min(at + BATCH, last)) for at in range(first, last, BATCH)]


def check(model: dllm.DiffusionModel, seeds: range) -> int:
    """How many of the cases were no refused combinations."""
    taken = 0
    for seed in seeds:
        one = case(seed, model)
        batch = together(model, one)
        if batch is not None:
            taken += 1
            assert batch == alone(model, one), f"seed {seed}: {one}"
    return taken


@pytest.mark.parametrize("seeds", groups(0, FAST), ids=str)
def test_a_batch_is_its_rows_alone(tiny: dllm.DiffusionModel, seeds: range) -> None:
    assert check(tiny, seeds) >= BATCH / 4


@pytest.mark.slow
@pytest.mark.parametrize("seeds", groups(FAST, MANY), ids=str)
def test_many_batches_are_their_rows_alone(tiny: dllm.DiffusionModel, seeds: range) -> None:
    check(tiny, seeds)


def in_threads(model: dllm.DiffusionModel, seeds: range) -> None:
    """Cases that run at the same time on one model are what they are one after the other."""
    cases = [case(seed, model) for seed in seeds]
    expected = [together(model, one) for one in cases]
    start = threading.Barrier(len(cases))

    def run(number: int) -> list[Outcome] | None:
        start.wait()
        return together(model, cases[number])

    with ThreadPoolExecutor(len(cases)) as pool:
        outcomes = list(pool.map(run, range(len(cases))))
    for one, before, after in zip(cases, expected, outcomes, strict=True):
        assert before == after, f"seeds {seeds}: {one}"


@pytest.mark.parametrize("seeds", [range(at, at + THREADS) for at in (10_000, 10_008)], ids=str)
def test_threads_share_a_model(tiny: dllm.DiffusionModel, seeds: range) -> None:
    in_threads(tiny, seeds)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(11_000, 12_000, THREADS))
def test_many_threads_share_a_model(tiny: dllm.DiffusionModel, first: int) -> None:
    in_threads(tiny, range(first, first + THREADS))
