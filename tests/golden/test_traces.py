"""Decoding traces recorded from the official implementations: same tokens, commits and forwards.

Forwards of the official code that revealed nothing have no counterpart here: a step whose schedule
grants nothing, or whose block is complete already, is not paid for.
"""

from collections.abc import Callable
from typing import Any

import pytest

from dllm.runtime.trace import TraceStep

from .recorded import recorded
from .replay import BUILDERS, call_of, drawn
from .together import Together

MASK = 255

Steps = list[list[tuple[int, int]]]


CASES = recorded(*(name for name in BUILDERS if not name.startswith("freedave")))


def _rows(case: dict[str, Any]) -> list[tuple[list[int], int]]:
    """Prompts without padding, and how far padding had moved them."""
    if "batch" not in case:
        return [(case["prompt"], 0)]
    pairs = zip(case["prompt"], case["attention_mask"], strict=True)
    kept = [[token for token, keep in zip(*pair, strict=True) if keep] for pair in pairs]
    return [(ids, len(case["prompt"][0]) - len(ids)) for ids in kept]


TOGETHER = Together(
    (case.values[0] for case in CASES),
    call_of,
    lambda case: [ids for ids, _ in _rows(case)],
    drawn,
)


def _of_row(case: dict[str, Any], row: int, moved: int) -> Steps:
    """What every forward of a run did to one row of its batch."""
    if "batch" not in case:
        return [[(p, t) for p, t in step] for step in case["steps"]]
    return [[(p - moved, t) for r, p, t in step if r == row] for step in case["steps"]]


def _expected(case: dict[str, Any], row: int, moved: int) -> Steps:
    return [step for step in _of_row(case, row, moved) if step]


def _expected_sizes(case: dict[str, Any], row: int = 0, moved: int = 0) -> list[int]:
    """Positions fed to the model in each forward that has a counterpart, without padding."""
    sizes, most = [], 0
    for size, step in zip(case["n_query"], _of_row(case, row, moved), strict=True):
        most = max(most, size - moved)
        if step:
            sizes.append(most)
            most = 0
    return sizes


def _outcome(step: TraceStep) -> list[tuple[int, int]]:
    """What a step changed on the canvas; what it committed and took back at once is no change."""
    commits = {p: t for p, t, _ in step.commits}
    taken = {p: MASK for p in step.remasked if p not in commits}
    return sorted({**{p: t for p, t in commits.items() if p not in step.remasked}, **taken}.items())


def kept_once(case: dict[str, Any]) -> int:
    """The forwards of a cached run of d3LLM's code for Dream that keep nothing twice.

    While decided blocks wait, its refresh keeps what is left of the last of them, but goes on
    counting what was kept before: where several wait, all but the last are then kept again.
    """
    start, size, end = len(case["prompt"]), case["block_size"], len(case["final"])
    edges, since = [*range(start, end, size), end], {start: 0}
    decided, counted, kept = set(range(start)), 0, 0
    for number, step in enumerate(case["steps"], 1):
        waiting = [e for e in edges if e > counted and decided.issuperset(range(e))]
        delays = {e: number - since.setdefault(e, number) for e in waiting}
        ready = [e for e, delay in delays.items() if delay >= case["cache_delay_iter"]]
        if ready and kept > counted:
            return number - 1
        if ready:
            counted = kept = ready[-1]
        elif counted and (waiting or number % case["refresh_interval"] == 0):
            kept = edges[edges.index(waiting[-1]) - 1] if waiting else counted
        decided.update(p for p, _ in step)
    return len(case["steps"])


def sound(case: dict[str, Any], expected: Steps) -> tuple[Steps, bool]:
    """The steps up to which the official run decodes as every method does, and whether that is
    all.  Three defects of official code end it: `kept_once`, a top-k that takes more positions than
    are eligible and writes over decided ones (or masks them), and a loop with a fixed number of
    steps that leaves a block, or ends, with masks in it."""
    if case.get("algorithm") == "d3llm_multi_block_dream":
        forwards = kept_once(case)
        kept = [step for step in case["steps"][:forwards] if step]
        return expected[: len(kept)], forwards == len(case["steps"])
    decided = set(range(len(case["prompt"])))
    for i, step in enumerate(expected):
        fresh = [(p, t) for p, t in step if p not in decided and t != MASK]
        if len(fresh) < len(step):
            return [*expected[:i], *([fresh] if fresh else [])], False
        decided.update(p for p, _ in fresh)
    if not case.get("masks_left"):
        return expected, True
    block = case.get("block_length") or len(case["final"])
    left = case["final"].index(MASK, len(case["prompt"])) - len(case["prompt"])
    edge = len(case["prompt"]) + (left // block + 1) * block
    inside = [all(p < edge for p, _ in step) for step in expected]
    return expected[: inside.index(False) if False in inside else len(expected)], False


@pytest.mark.parametrize("case", CASES)
def test_official_trace_is_reproduced(
    case: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    results, rows = TOGETHER.results(case, call_of(case)), _rows(case)
    for row, (result, (_, moved)) in enumerate(zip(results, rows, strict=True)):
        final = case["final"][row] if "batch" in case else case["final"]
        expected = _expected(case, row, moved)
        outcome = [_outcome(step) for step in result.trace.steps]
        sizes = [step.computed for step in result.trace.steps]
        expected_sizes = _expected_sizes(case, row, moved)
        if result.finish_reason == "stop" and case.get("early_stop"):
            # The official code fills behind the block, this one behind the stop id: compare the
            # text, and in the last step what lies in the block, if anything does.
            edge = result.trace.steps[-1].window[0] + case["block_length"]
            expected[-1] = [(p, t) for p, t in expected[-1] if p < edge]
            expected = expected if expected[-1] else expected[:-1]
            final = [*final[: result.prompt_length + len(result.tokens)]]
        elif "batch" not in case:
            official = expected
            expected, whole = sound(case, expected)
            if not whole:  # the same up to there; decoding goes on
                record_property("in part", True)
                assert outcome[: len(expected)] == expected
                if len(expected) == len(official):  # the defect is the last forward's
                    pairs = enumerate(zip(result.sequences.tolist(), final, strict=True))
                    other = {p for p, (ours, theirs) in pairs if theirs not in (ours, MASK)}
                    assert other <= {p for p, _ in official[-1]}
                assert sizes[: len(expected)] == expected_sizes[: len(expected)]
                continue
        assert outcome == expected
        assert result.sequences.tolist()[: len(final) - moved] == final[moved:]
        assert result.nfe == len(expected)
        assert sizes == expected_sizes[: len(expected)]


def test_there_are_cases_of_every_algorithm() -> None:
    recorded = {case.values[0]["algorithm"] for case in CASES}
    assert recorded | {"freedave_llada", "freedave_dream"} == set(BUILDERS)


def test_a_run_that_writes_over_its_decisions_is_compared_up_to_there() -> None:
    case = {"prompt": [1, 2], "final": [1, 2, 5, 6, MASK, 8], "block_length": 2}
    steps = [[(2, 5)], [(3, 6), (2, 9)], [(4, 7)]]
    assert sound(case, steps) == ([[(2, 5)], [(3, 6)]], False)
    assert sound(case, [[(2, 5)], [(2, MASK)], [(3, 6)]]) == ([[(2, 5)]], False)
    steps = [[(2, 5)], [(3, 6)], [(5, 8)]]
    assert sound(case, steps) == (steps, True)
    assert sound({**case, "masks_left": True}, steps) == (steps, False)
    left = {**case, "final": [1, 2, MASK, 6, 7, 8], "masks_left": True}
    assert sound(left, [[(3, 6)], [(4, 7)], [(5, 8)]]) == ([[(3, 6)]], False)
