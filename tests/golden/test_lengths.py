"""Recorded runs of DAEDAL and rho-EOS, whose canvases change their length while they are written:
the same commits, edits, forwards and final tokens, alone and side by side."""

from __future__ import annotations

import json
from typing import Any

import pytest

import dllm
from dllm.trace import TraceStep

from .conftest import goldens_dir
from .together import model_of

CASES = [
    case
    for name in ("daedal_llada", "rho_eos_llada")
    for case in json.loads((goldens_dir() / "traces" / f"{name}.json").read_text())["cases"]
]


def call(case: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `dllm.generate` that reproduce ``case``."""
    common = "initial={initial_gen_length}, expand={expansion_factor}, tokens={eos_check_tokens}"
    rules = {
        "daedal_llada": "daedal({common}, enough={eos_confidence_threshold}, "
        "insert_until={expand_eos_confidence_threshold}, low={low_conf_threshold}, official=True)",
        "rho_eos_llada": "rho({common}, low={low_density_threshold}, "
        "high={high_density_threshold}, schedule={scheduler}, official=True)",
    }
    values = {"common": common.format(**case), **case}
    return {
        "sampler": f"threshold({case['high_conf_threshold']})", "cache": "none",
        "length": rules[case["algorithm"]].format(**values),
        "max_new_tokens": case["max_gen_length"], "block_length": case["block_length"],
        "eos_policy": "none", "suppress_mask": False, "trace": True,
    }  # fmt: skip


def verbs(step: TraceStep, size: int) -> list[list[Any]]:
    """The edits of a step as recorded, on a canvas of ``size`` positions."""
    result: list[list[Any]] = []
    for at, removed, added, token in step.edits:
        if token is not None:
            result.append(["eos_tail", added])
        elif at == size:
            result.append(["append", added])
        elif added == 0 and at + removed == size:
            result.append(["cut", removed])
        else:
            assert removed == 1
            result.append(["insert", at, added])
        size += added - removed
    return result


def commits(step: TraceStep, size: int) -> list[list[int]]:
    """What a step decided and did not cut off at once."""
    cut = sum(removed for _, removed, added, _ in step.edits if not added)
    return [[p, t] for p, t, _ in sorted(step.commits) if p < size - cut]


def check(case: dict[str, Any], result: dllm.Result) -> None:
    assert result.trace is not None
    steps = result.trace.steps
    assert result.nfe == case["nfe"]
    assert [step.computed for step in steps] == case["n_query"]
    edits = [verbs(step, size) for step, size in zip(steps, case["n_query"], strict=True)]
    assert edits == case["edits"]
    if case["algorithm"] == "rho_eos_llada":
        found = [commits(step, size) for step, size in zip(steps, case["n_query"], strict=True)]
    else:
        found = [[[p, t] for p, t, _ in sorted(step.commits)] for step in steps]
        assert result.probes == case["stage"].count(1)
    assert found == case["steps"]
    assert result.sequences.tolist() == case["final"]
    assert result.canvas == len(case["final"]) - len(case["prompt"])


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_a_recorded_run(case: dict[str, Any]) -> None:
    model = model_of(case["model"], case["eos_token_id"])
    check(case, dllm.generate(model, case["prompt"], **call(case)))


def test_recorded_runs_side_by_side() -> None:
    """The cases that share a model and an end token as rows of one session, few at a time."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for case in CASES:
        groups.setdefault((case["model"], case["eos_token_id"]), []).append(case)
    shared = [group for group in groups.values() if len(group) > 1]
    assert shared
    for (name, eos), group in groups.items():
        if len(group) < 2:
            continue
        with dllm.Session(model_of(name, eos), cache="none", max_rows=3) as session:
            handles = []
            for case in group:
                arguments = {k: v for k, v in call(case).items() if k != "cache"}
                handles.append(session.submit(case["prompt"], **arguments))
            for case, handle in zip(group, handles, strict=True):
                check(case, handle.result(timeout=300))
