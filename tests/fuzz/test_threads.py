"""Random ways of decoding that run at the same time on one model do not disturb each other."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import dllm

from .decoding import Outcome, case, together
from .seeds import case_of

THREADS = 5


@pytest.mark.fuzz(3)
@pytest.mark.parametrize("kind", ["tiny", pytest.param("noisy", marks=pytest.mark.slow)])
def test_threads_share_a_model(kind: str, seeds: range, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    with ThreadPoolExecutor(THREADS) as pool:
        for first in range(seeds[0], seeds[-1] + 1, THREADS):
            in_threads(model, range(first, first + THREADS), pool)


def in_threads(model: dllm.DiffusionModel, seeds: range, pool: ThreadPoolExecutor) -> None:
    """Cases at the same time are what they are one after the other."""
    cases = [case(seed, model) for seed in seeds]
    expected = [together(model, one) for one in cases]
    start = threading.Barrier(len(cases))

    def run(number: int) -> list[Outcome] | None:
        start.wait()
        return together(model, cases[number])

    outcomes = list(pool.map(run, range(len(cases))))
    for one, before, after in zip(cases, expected, outcomes, strict=True):
        with case_of(one.seed, f"{one} beside {seeds}"):
            assert before == after
