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
from .replay import BUILDERS, call_of, replayable

FILES = (
    "llada_generate*", "fastdllm_*", "dream_diffusion_generate*", "dparallel_*", "adablock_*",
    "prophet_*", "r2_*", "dinfer_*", "d3llm_*", "dkv_*", "dllm_cache_*", "window_diffusion_*",
)  # fmt: skip

# Cases whose official end is not reproduced, and what is compared instead.
OVERWRITTEN = "the last top-k takes more positions than are eligible: it masks decided ones"
DEVIATIONS = {f"window_diffusion_dream-{i:03}": OVERWRITTEN for i in (0, 2, 6, 10, 12, 16)}

Steps = list[list[tuple[int, int]]]


def _cases() -> Iterator[Any]:
    folder = goldens_dir() / "traces"
    for path in sorted({path for pattern in FILES for path in folder.glob(pattern + ".json")}):
        for case in json.loads(path.read_text())["cases"]:
            if replayable(case):
                yield pytest.param(case, id=case["id"])


CASES = list(_cases())


@cache
def _model(name: str, eos_id: int | None = None) -> dllm.DiffusionModel:
    own = {} if eos_id is None else {
        "eos_token_id": eos_id, "pad_token_id": eos_id, "stop_token_ids": (eos_id,),
    }  # fmt: skip
    return dllm.load(Path(goldens_dir()) / name, **own)


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
        _model(case["model"], case.get("eos_id")), [ids for ids, _ in rows],
        sampler=call.sampler, cache=call.cache,
        trace=True, **call.arguments,
    )  # fmt: skip
    for row, (result, (_, moved)) in enumerate(zip(results, rows, strict=True)):
        final = case["final"][row] if "batch" in case else case["final"]
        expected = _expected(case, row, moved)
        outcome = [[(p, t) for p, t, _ in step.commits] for step in result.trace.steps]
        sizes = [step.computed for step in result.trace.steps]
        if DEVIATIONS.get(case["id"]) == OVERWRITTEN:  # the same up to there; decoding goes on
            assert outcome[: len(expected)] == [
                [c for c in step if c[1] != 255] for step in expected
            ]
            assert sizes[: len(expected)] == _expected_sizes(case)
            continue
        if result.finish_reason == "stop" and case.get("early_stop"):
            # The official code fills behind the block, this one behind the stop id: compare the
            # text, and in the last step what lies in the block.
            edge = result.trace.steps[-1].window[0] + case["block_length"]
            expected[-1] = [(p, t) for p, t in expected[-1] if p < edge]
            final = [*final[: result.prompt_length + len(result.tokens)]]
        assert outcome == expected
        assert result.sequences.tolist()[: len(final) - moved] == final[moved:]
        assert result.nfe == len(expected)
        if "batch" not in case:  # there sizes include padding
            assert sizes == _expected_sizes(case)


def test_the_number_of_cases_is_the_one_that_is_claimed() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"{len(CASES)} decoding traces" in readme


def test_there_are_cases_of_every_algorithm() -> None:
    recorded = {case.values[0]["algorithm"] for case in CASES}
    assert recorded == set(BUILDERS)
