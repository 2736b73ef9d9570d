"""ReMDM's loop: what is taken back when, and what is committed instead."""

import dllm
from dllm.samplers import compose

from ..table import hashed, table_model
from .test_vectors import canvas_of, decide, predict


def test_the_loop_takes_twice_the_steps_and_writes_n_at_a_time() -> None:
    result = dllm.generate(
        table_model(hashed(5)), [1, 2], sampler="remdm(n=2, start=0.5)", cache="none",
        max_new_tokens=8, block_length=8, eos_policy="none", trace=True,
    )  # fmt: skip
    assert result.trace is not None
    steps = result.trace.steps
    assert result.nfe == 16
    # four by the schedule, eight in the loop, four more
    assert [len(step.commits) for step in steps] == [1] * 4 + [2] * 8 + [1] * 4
    assert [len(step.remasked) for step in steps] == [0] * 3 + [2] * 8 + [0] * 5


def test_the_least_sure_when_committed_are_taken_back() -> None:
    canvas, sampler = canvas_of(4), compose("remdm(n=1, start=0.75)")
    for p in ([0.2, 0.3, 0.9, 0.1], [0.8, 0.7, 0.1], [0.5, 0.6]):
        assert sampler.prepare(canvas)
        decision = decide(sampler, canvas, predict(canvas, p))
        canvas.step, canvas.block_step = canvas.step + 1, canvas.block_step + 1
    # committed: 2 with 0.9, 0 with 0.8, 3 with 0.6
    assert decision.committed.tolist() == [3]
    assert decision.remasked.tolist() == [3]
