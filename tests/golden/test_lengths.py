"""Recorded runs of DAEDAL, whose canvas changes its length while it is written: the same commits,
edits, forwards and final tokens, alone and side by side."""

from typing import Any

import pytest

import dllm
from dllm.runtime.trace import TraceStep

from .call import Call
from .quirks import parts
from .recorded import recorded
from .replay import OFFICIAL
from .together import model_of

CASES = recorded("daedal_llada")
RULE = (
    "threshold({high_conf_threshold})+released_daedal(initial={initial_gen_length}, "
    "expand={expansion_factor}, tokens={eos_check_tokens}, eos_token_id={eos_token_id}, "
    "enough={eos_confidence_threshold}, low={low_conf_threshold}, "
    "insert_until={expand_eos_confidence_threshold})"
)


def call_of(case: dict[str, Any]) -> Call:
    return Call(parts(RULE.format(**case)), "none", {
        "max_new_tokens": case["max_gen_length"], "block_length": case["block_length"], **OFFICIAL,
    })  # fmt: skip


BUILDERS = {"daedal_llada": call_of}


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


def check(case: dict[str, Any], result: dllm.Result) -> None:
    assert result.trace is not None
    steps = result.trace.steps
    assert result.nfe == case["nfe"]
    assert [step.computed for step in steps] == case["n_query"]
    edits = [verbs(step, size) for step, size in zip(steps, case["n_query"], strict=True)]
    assert edits == case["edits"]
    found = [[[p, t] for p, t, _ in sorted(step.commits)] for step in steps]
    assert result.probes == case["stage"].count(1)
    assert found == case["steps"]
    assert result.sequences.tolist() == case["final"]
    assert result.canvas == len(case["final"]) - len(case["prompt"])


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_run(case: dict[str, Any]) -> None:
    model, call = model_of(case["model"], case["eos_token_id"]), call_of(case)
    result = dllm.generate(
        model, case["prompt"], sampler=call.sampler, cache=call.cache, trace=True, **call.arguments
    )
    check(case, result)


@pytest.mark.slow
def test_recorded_runs_side_by_side() -> None:
    """The cases that share a model and an end token as rows of one session, few at a time."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for parameter in CASES:
        case: Any = parameter.values[0]
        groups.setdefault((case["model"], case["eos_token_id"]), []).append(case)
    shared = {key: group for key, group in groups.items() if len(group) > 1}
    assert shared
    for (name, eos), group in shared.items():
        with dllm.Session(model_of(name, eos), cache="none", max_batch_size=3) as session:
            handles = []
            for case in group:
                call = call_of(case)
                handles.append(
                    session.submit(
                        case["prompt"], sampler=call.sampler, trace=True, **call.arguments
                    )
                )
            for case, handle in zip(group, handles, strict=True):
                check(case, handle.result(timeout=300))
