"""Traces of methods published in 2026: editing, remasking, what lies behind a block.

What is compared is what `test_traces` compares.  Where a method looks at a decided block again,
forwards that change nothing are compared, too.
"""

from typing import Any

import pytest

from .call import Call
from .recorded import recorded
from .replay_recent import BUILDERS, drawn
from .test_traces import _expected, _expected_sizes, _outcome
from .together import Together

CASES = recorded("llada21_edit", "remdm", "dpad")
LOOKS_AGAIN = ("llada21_edit", "remdm")


def call_of(case: dict[str, Any]) -> Call:
    """The call that reproduces ``case``."""
    return BUILDERS[case["algorithm"]](case)


TOGETHER = Together((case.values[0] for case in CASES), call_of, draws_of=drawn)


@pytest.mark.parametrize("case", CASES)
def test_official_trace_is_reproduced(case: dict[str, Any]) -> None:
    (result,) = TOGETHER.results(case, call_of(case))
    assert result.trace is not None
    expected = [[(p, t) for p, t in step] for step in case["steps"]]
    sizes = case["n_query"]
    if case["algorithm"] not in LOOKS_AGAIN:
        expected, sizes = _expected(case, 0, 0), _expected_sizes(case)
    end = len(case["prompt"]) + len(result.tokens)
    if result.finish_reason == "stop":  # behind its block the official code fills
        size, start = case["block_length"], len(case["prompt"])
        edge = start + -(-(end - start) // size) * size
        if not case["model"].startswith("llada2"):
            expected[-1] = [(p, t) for p, t in expected[-1] if p < edge]
    steps = result.trace.steps[: len(expected)]
    assert [_outcome(step) for step in steps] == expected
    assert [step.computed for step in steps] == sizes
    assert result.tokens == case["final"][len(case["prompt"]) : end]
    if not case.get("masks_left") or result.finish_reason == "stop":
        assert result.nfe == len(expected)
