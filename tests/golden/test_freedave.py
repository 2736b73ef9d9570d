"""Recorded runs of FreeDave: the same text by the same forwards.

The official code commits a draft when the next forward has confirmed it; here the first draft is
the row's own commit, a forward earlier.  So what it has decided after each forward lies between
what this library had decided before that forward and after it.
"""

from typing import Any

import pytest

from .recorded import recorded
from .replay import call_of
from .together import Together

CASES = recorded(
    "freedave_llada", "freedave_dream",
    # Eager acceptance drafts ahead into later blocks: not built.
    where=lambda case: not case["eager_acceptance_mode"]
    or case["gen_length"] <= case["block_length"],
)  # fmt: skip

TOGETHER = Together((case.values[0] for case in CASES), call_of)


def _decided(steps: list[list[Any]]) -> list[set[int]]:
    """Positions decided after each step."""
    result: list[set[int]] = []
    for step in steps:
        result.append((result[-1] if result else set()) | {entry[0] for entry in step})
    return result


@pytest.mark.parametrize("case", CASES)
def test_recorded_drafts_are_confirmed_by_the_same_forwards(case: dict[str, Any]) -> None:
    (result,) = TOGETHER.results(case, call_of(case))
    assert result.trace is not None
    assert result.sequences.tolist() == case["final"]
    ours = _decided([step.commits for step in result.trace.steps])
    official, queries = _decided(case["steps"]), [*case["n_query"]]
    start, size = len(case["prompt"]), case["block_length"]
    for i, after in enumerate(ours):
        before = ours[i - 1] if i else set()
        # A forward that feeds nothing but complete blocks again confirms what is known (G9).
        whole = len(before) % size == 0 and before == set(range(start, start + len(before)))
        if i and whole and official[i] == before != official[i - 1]:
            del official[i], queries[i]
        assert before <= official[i] <= after, i
    assert len(official) == len(ours) == result.nfe
    if case["confidence_threshold"] is None:  # else official drafts repeat once they are complete
        fed = [step.computed * (1 + step.explored) for step in result.trace.steps]
        assert fed == queries
