"""Decoding traces recorded from the official implementations: same tokens, commits and forwards.

Forwards of the official code that revealed nothing have no counterpart here: a step whose schedule
grants nothing, or whose block is complete already, is not paid for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import dllm

from .conftest import goldens_dir
from .replay import BUILDERS, call_of

FILES = (
    "llada_generate*", "fastdllm_*", "dream_diffusion_generate*", "dparallel_*", "dkv_*",
)  # fmt: skip

Steps = list[list[tuple[int, int]]]


def _cases() -> Iterator[Any]:
    folder = goldens_dir() / "traces"
    for path in sorted({path for pattern in FILES for path in folder.glob(pattern + ".json")}):
        for case in json.loads(path.read_text())["cases"]:
            yield pytest.param(case, id=case["id"])


CASES = list(_cases())


@cache
def _model(name: str) -> dllm.DiffusionModel:
    return dllm.load(Path(goldens_dir()) / name)


def _rows(case: dict[str, Any]) -> list[tuple[list[int], int]]:
    """Prompts without padding, and how far padding had moved them."""
    if "batch" not in case:
        return [(case["prompt"], 0)]
    pairs = zip(case["prompt"], case["attention_mask"], strict=True)
    kept = [[token for token, keep in zip(*pair, strict=True) if keep] for pair in pairs]
    return [(ids, len(case["prompt"][0]) - len(ids)) for ids in kept]


def _expected(case: dict[str, Any], row: int, moved: int) -> Steps:
    steps = case["steps"]
    if "batch" in case:
        steps = [[(p - moved, t) for r, p, t in step if r == row] for step in steps]
    return [[(p, t) for p, t in step] for step in steps if step]


def _expected_sizes(case: dict[str, Any]) -> list[int]:
    """Positions fed to the model in each forward that has a counterpart."""
    sizes, most = [], 0
    for size, step in zip(case["n_query"], case["steps"], strict=True):
        most = max(most, size)
        if step:
            sizes.append(most)
            most = 0
    return sizes


@pytest.mark.parametrize("case", CASES)
def test_official_trace_is_reproduced(case: dict[str, Any]) -> None:
    call, rows = call_of(case), _rows(case)
    results = dllm.generate(
        _model(case["model"]), [ids for ids, _ in rows], sampler=call.sampler, cache=call.cache,
        trace=True, **call.arguments,
    )  # fmt: skip
    for row, (result, (_, moved)) in enumerate(zip(results, rows, strict=True)):
        final = case["final"][row] if "batch" in case else case["final"]
        expected = _expected(case, row, moved)
        found = [[(p, t) for p, t, _ in step.commits] for step in result.trace.steps]
        assert found == expected
        assert result.sequences.tolist() == final[moved:]
        assert result.nfe == len(expected)
        if "batch" not in case:  # there sizes include padding
            assert [step.computed for step in result.trace.steps] == _expected_sizes(case)


def test_there_are_cases_of_every_algorithm() -> None:
    recorded = {case.values[0]["algorithm"] for case in CASES}
    assert recorded == set(BUILDERS)
