"""What a user does with any model, on one whose canvases hold random tokens in place of masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dllm

PROMPT = "Reverse this list: Tom, Anna, Ben"


@pytest.mark.parametrize(
    "how",
    [
        {"eos_policy": "suppress"},
        {"top_p": 0.7, "temperature": 1.0},
        {"top_k": 3, "temperature": 1},
    ],
)
def test_sweeps_draw_what_bans_and_filters_leave(noisy: dllm.DiffusionModel, how: Any) -> None:
    sampler = "ddim(num_inference_steps=9, corrector_steps=2, corrector_k=8)"
    result = dllm.generate(noisy, PROMPT, sampler=sampler, cache="block", max_new_tokens=16, **how)
    assert result.nfe == 18
    if "eos_policy" in how:
        assert not {*result.tokens} & {*noisy.facts.stop_token_ids}


class Drafts:
    """A streamer that keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def put(self, value: Any) -> None: ...
    def end(self) -> None: ...

    def put_draft(self, value: Any) -> None:
        self.seen.append(value.tolist())


@pytest.mark.parametrize("sampler", ["entropy_bound(16, t_min=3, t_max=3", "ddim(12"])
def test_drafts_are_what_the_canvas_would_end_as(sampler: str) -> None:
    """The likeliest tokens, not those drawn: a canvas ends once they are the draft before."""
    model = dllm.load(Path(__file__).parents[1] / "examples" / "nano-uniform", dtype="float32")
    how: Any = {
        "sampler": f"{sampler}, stability_threshold=1, confidence_threshold=99)", "cache": "block",
        "max_new_tokens": 32, "temperature": 3.0 if sampler.startswith("ddim") else 0,
    }  # fmt: skip
    streamer = Drafts()
    result = dllm.generate(model, PROMPT, streamer=streamer, trace=True, **how)
    events = [*dllm.stream(model, PROMPT, **how)]
    assert 2 <= result.nfe < 12 and result.trace is not None
    drafts = [[*event.drafts.values()] for event in events[:-1]]
    assert streamer.seen == drafts
    assert [[t for _, t in step.drafts] for step in result.trace.steps[:-1]] == drafts
    assert drafts[-1] == [*events[-1].committed.values()]


def test_holes_of_unknown_length(noisy: dllm.DiffusionModel) -> None:
    once, again = (dllm.infill(noisy, "Ben, [[1..6]], Tom", prompt=PROMPT) for _ in range(2))
    assert once.tokens == again.tokens and once.probes == 1
    assert once.text.startswith("Ben,") and once.text.endswith(", Tom")
