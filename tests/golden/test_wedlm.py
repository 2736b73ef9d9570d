"""Recorded runs of WeDLM's two decoders: its streaming engine, and the blocks of its network file.

The recordings ran the official scheduler, window, sampler and network on a CPU.  The engine feeds
the prompt in a forward of its own, and after the last decision once more what was decided; here
the prompt goes with the first window, and what will not be read any more is not fed.  Its window
looks past the last token that was asked for, so that cases are replayed on a canvas that is longer
by a window.
"""

from collections.abc import Callable
from typing import Any

import pytest

import dllm

from .call import Call
from .quirks import parts
from .recorded import recorded
from .together import model_of

Step = list[tuple[int, int]]


def _stream(case: dict[str, Any]) -> Call:
    window = case["window"]
    sampler = "wedlm(tau={tau}, penalty={pos_penalty})+dcd(s_init={window}, s_max={window})".format(
        tau=case["entropy_threshold"] or 0.0, **case
    )
    policy = "none" if case["eos_id"] is None else "prefix_complete"
    return Call(sampler, "wedlm", {"max_new_tokens": case["gen_length"] + window,
                                   "eos_policy": policy})  # fmt: skip


def _blocks(case: dict[str, Any]) -> Call:
    tau = case["confidence_threshold"]
    sampler = f"threshold(tau={tau})" if tau else "fixed"
    sampler += f"+released_blocks({case['block_length']})"
    return Call(
        parts(sampler), "none", {"max_new_tokens": case["gen_length"], "eos_policy": "none"}
    )


BUILDERS: dict[str, Callable[[dict[str, Any]], Call]] = {
    "wedlm_stream": _stream, "wedlm_blocks": _blocks,
}  # fmt: skip
CASES = recorded(*BUILDERS)


@pytest.mark.parametrize("case", CASES)
def test_official_trace_is_reproduced(case: dict[str, Any]) -> None:
    call = BUILDERS[case["algorithm"]](case)
    result = dllm.generate(
        model_of(case["model"], case.get("eos_id")), case["prompt"], sampler=call.sampler,
        cache=call.cache, suppress_mask=False, trace=True, **call.arguments,
    )  # fmt: skip
    assert result.trace is not None
    outcome = [[(p, t) for p, t, _ in step.commits] for step in result.trace.steps]
    fed = [step.computed for step in result.trace.steps]
    expected: list[Step] = [[(p, t) for p, t in step] for step in case["steps"]]
    sizes = case["n_query"]
    if case["algorithm"] == "wedlm_stream":
        assert expected[0] == expected[-1] == []
        expected, sizes = expected[1:-1], [sizes[0] + sizes[1], *sizes[2:-1]]
        assert case["eos_id"] is None or result.nfe == len(expected)
        outcome, fed = outcome[: len(expected)], fed[: len(expected)]
    assert outcome == expected
    assert fed == sizes
    assert result.sequences.tolist()[: len(case["final"])] == case["final"]
