"""Traces of methods published in 2026: editing, remasking, suffixes, speculation.

What is compared is what `test_traces` compares; here forwards that change nothing are forwards of
the method, too.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from .call import Call
from .conftest import goldens_dir
from .replay_recent import BUILDERS, FILES
from .test_traces import _outcome
from .together import Together

CASES = [
    pytest.param(case, id=case["id"])
    for name in FILES
    for case in json.loads((goldens_dir() / "traces" / f"{name}.json").read_text())["cases"]
]


def call_of(case: dict[str, Any]) -> Call:
    """The call that reproduces ``case``."""
    return BUILDERS[case["algorithm"]](case)


TOGETHER = Together((case.values[0] for case in CASES), call_of)


@pytest.mark.parametrize("case", CASES)
def test_official_trace_is_reproduced(case: dict[str, Any]) -> None:
    (result,) = TOGETHER.results(case, call_of(case))
    assert result.trace is not None
    expected = [[(p, t) for p, t in step] for step in case["steps"]]
    steps = result.trace.steps[: len(expected)]
    assert [_outcome(step) for step in steps] == expected
    assert [step.computed for step in steps] == case["n_query"]
    end = len(case["prompt"]) + len(result.tokens)
    assert result.tokens == case["final"][len(case["prompt"]) : end]
    if not case.get("masks_left") or result.finish_reason == "stop":
        assert result.nfe == len(expected)
