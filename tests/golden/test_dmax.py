"""Recorded runs of DMax's soft parallel decoding: every forward's revisions, and what it fed.

The official code prefills the prompt in a forward of its own; here that is part of the first one.
"""

from typing import Any

import pytest

from .call import Call
from .recorded import recorded
from .test_traces import _outcome
from .together import Together

CASES = recorded("dmax_spd")


def call_of(case: dict[str, Any]) -> Call:
    policy = "block_contains" if case["eos_early_stop"] else "none"
    return Call(
        f"dmax(threshold={case['threshold']}, top_k={case['top_k']})", "block",
        {"max_new_tokens": len(case["final"]) - len(case["prompt"]), "eos_policy": policy,
         "block_length": case["block_length"], "suppress_mask": False},
    )  # fmt: skip


BUILDERS = {"dmax_spd": call_of}
TOGETHER = Together((case.values[0] for case in CASES), call_of)


@pytest.mark.parametrize("case", CASES)
def test_soft_parallel_decoding(case: dict[str, Any]) -> None:
    (result,) = TOGETHER.results(case, call_of(case))
    assert result.trace is not None
    expected, sizes = case["steps"][1:], case["n_query"][1:]
    sizes[0] += len(case["prompt"]) // case["block_length"] * case["block_length"]
    steps = [_outcome(step) for step in result.trace.steps]
    size, end = case["block_length"], len(case["prompt"]) + len(result.tokens)
    if result.finish_reason == "stop":  # behind its block the official code fills
        edge = -(-end // size) * size
        expected[-1] = [(p, t) for p, t in expected[-1] if p < edge]
    assert steps == [[(p, t) for p, t in step] for step in expected]
    assert [step.computed for step in result.trace.steps] == sizes
    assert result.tokens == case["final"][len(case["prompt"]) : end]
    assert result.nfe == case["nfe"] - 1
