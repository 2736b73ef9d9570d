"""Traces of S2D2's official code: same tokens, commits and forwards, given its random draws.

Released code verifies within the step that drafts; here these are two steps, and edits come with
the first.  It feeds the prompt, and every block that is finished, once more by themselves; here
they join the next forward.  In a forward that verifies only the run of masks is fed as masks.
"""

from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.engine import forward
from dllm.kernels.divergence import residual
from dllm.request import requests

from ..thin import some
from .recorded import recorded
from .replay_recent import s2d2
from .together import model_of

CASES = recorded("s2d2_llada21", "s2d2_sdar")


def replay(case: dict[str, Any], cache: str, monkeypatch: pytest.MonkeyPatch) -> dllm.Result:
    """The run of ``case`` with its draws: uniform numbers, and the tokens in place of drafts."""
    draws = iter(draw for _, draw in case["draws"])
    now: dict[str, Any] = {}

    def replaced(q: torch.Tensor, p: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        now.update({"resampled": None}, **next(draws))
        if now["resampled"] is None:
            return residual(q, p, keys)
        gained = q.exp() - p.exp() > 0
        assert now["n_candidates"] in gained.sum(1).tolist()
        assert gained[:, now["resampled"]].any()
        return torch.full((len(q),), now["resampled"])

    monkeypatch.setattr(forward, "residual", replaced)
    monkeypatch.setattr(requests, "uniform", lambda *_: np.array(now["u"], np.float32))
    call = s2d2(case)
    model = model_of(case["model"], case.get("eos_id"), case["block_length"])
    result = dllm.generate(
        model, case["prompt"], sampler=call.sampler, cache=cache, trace=True, **call.arguments
    )
    assert isinstance(result, dllm.Result)
    assert next(draws, None) is None
    return result


@pytest.mark.parametrize("case", some(CASES, 10))
def test_official_trace_is_reproduced(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = replay(case, "block", monkeypatch)
    end = len(case["prompt"]) + len(result.tokens)
    assert result.tokens == case["final"][len(case["prompt"]) : end]
    assert result.trace is not None
    kinds, sizes, before, changed = list[str](), list[int](), 0, True
    for kind, size, step in zip(case["forwards"], case["n_query"], case["steps"], strict=True):
        if kind in ("draft", "verify"):
            size = size // 2 if kind == "verify" else size  # without the masks, fed besides
            kinds, sizes, before = [*kinds, kind], [*sizes, size + before], 0
            changed = bool(step)
        elif changed:  # what the last forward has seen as it stands is stored already
            before += size
    assert [step.computed for step in result.trace.steps] == sizes
    steps = (step for step, kind in zip(case["steps"], case["forwards"], strict=True)
             if kind in ("draft", "verify"))  # fmt: skip
    own: dict[int, int] = {}
    for i, (step, kind, expected) in enumerate(zip(result.trace.steps, kinds, steps, strict=True)):
        own |= {p: t for p, t, _ in step.commits}
        if kinds[i + 1 : i + 2] != ["verify"]:
            assert sorted(own.items()) == [(p, t) for p, t in expected], (i, kind)
            own = {}


def test_without_a_cache_the_text_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0].values[0]
    cached, whole = (replay(case, cache, monkeypatch) for cache in ("block", "none"))
    assert whole.tokens == cached.tokens
    assert whole.nfe == cached.nfe
    assert whole.computed > cached.computed
