"""A batch is its rows alone, in random ways of decoding."""

import pytest

import dllm

from .decoding import alone, case, together
from .seeds import case_of


@pytest.mark.fuzz(10)
def test_a_batch_is_its_rows_alone(tiny: dllm.DiffusionModel, seeds: range) -> None:
    check(tiny, seeds)


@pytest.mark.fuzz(1)
def test_canvases_of_random_tokens(noisy: dllm.DiffusionModel, seeds: range) -> None:
    check(noisy, seeds)


def check(model: dllm.DiffusionModel, seeds: range) -> None:
    taken = 0
    for seed in seeds:
        one = case(seed, model)
        with case_of(seed, one):
            batch = together(model, one)
            if batch is not None:  # else the combination is refused
                taken += 1
                assert batch == alone(model, one)
    assert taken >= len(seeds) / 4
