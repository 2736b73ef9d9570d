"""Traces of methods that slide: DCD, DSB.

What is compared is what `test_traces` compares.
"""

from typing import Any

import pytest

from .call import Call
from .recorded import recorded
from .replay_caches import BUILDERS, left_of_padding
from .test_traces import _expected, _expected_sizes
from .together import Together

CASES = recorded(*BUILDERS)


def call_of(case: dict[str, Any]) -> Call:
    """The call that reproduces ``case``."""
    sampler, cache, arguments = BUILDERS[case["algorithm"]](case)
    length = {"max_new_tokens": case["gen_length"]}
    return Call(
        sampler, cache, {"eos_policy": "none", "suppress_mask": False, **length, **arguments}
    )


TOGETHER = Together((case.values[0] for case in CASES), call_of)


@pytest.mark.parametrize("case", CASES)
def test_official_trace_is_reproduced(case: dict[str, Any]) -> None:
    call = call_of(case)
    (result,) = TOGETHER.results(case, call)
    assert result.trace is not None
    expected, sizes = _expected(case, 0, 0), _expected_sizes(case)
    outcome = [[(p, t) for p, t, _ in step.commits] for step in result.trace.steps]
    computed = [step.computed for step in result.trace.steps]
    if "eos_id" in case:
        expected, outcome = (left_of_padding(case, steps) for steps in (expected, outcome))
    assert outcome == expected
    assert result.sequences.tolist() == case["final"]
    assert computed == sizes
