"""ReMDM's loop: what is taken back when, and what is committed instead."""

from __future__ import annotations

import numpy as np
import pytest

import dllm
from dllm.core.errors import ConfigError
from dllm.samplers import Prediction, compose

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


@pytest.mark.parametrize("base", ["prob", "neg_entropy", "margin"])
def test_what_moves_scores_less(base: str) -> None:
    part = compose(f"stability(weight=2, of={base})+fixed").scorer
    canvas = canvas_of(3)
    p = np.array([0.5, 0.6, 0.7], np.float32)
    prediction = Prediction(
        np.arange(3), np.ones(3, np.int64), np.log(p), margin=p - 0.2, entropy=-p,
        kl=np.array([0.0, 0.25, np.inf], np.float32),
    )  # fmt: skip
    before = {"prob": p, "neg_entropy": p, "margin": p - 0.2}[base]
    assert part.score(canvas, prediction) == pytest.approx(before - [0, 0.5, 0])


def test_stability_offers_what_its_score_is() -> None:
    compose("stability+threshold")
    compose("stability(of=neg_entropy)+dparallel")
    with pytest.raises(ConfigError, match="probability scores"):
        compose("stability(of=margin)+threshold")
