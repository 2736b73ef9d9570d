"""Drafters of users: the one of examples/own_drafter.py, and such as return what is no draft."""

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dllm
from dllm.drafting.base import Distribution, Draft, Drafting, DraftRequest
from dllm.drafting.verifiers.packed import PackedVerifier

from .conftest import Scripted

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_drafter.py"


def test_the_example_drafts_for_the_verifier() -> None:
    model = dllm.load("nano-ar")
    part = runpy.run_path(str(EXAMPLE))["Assistant"](dllm.load("nano-ar").hf)
    prompt = "Compute 69 + 49."
    plain = dllm.speculate(model, None, prompt, max_new_tokens=32)
    fixed = "fixed(k=3)"  # the default measures times
    drafted = dllm.speculate(model, part, prompt, max_new_tokens=32, controller=fixed)
    assert drafted.tokens == plain.tokens
    assert drafted.accepted > 20  # the assistant is the verifier itself
    prompt = "Reverse this list: Tom, Anna, Ben"
    for how in ({"temperature": 1.0, "seed": 1}, {"controller": "fixed(k=3)"}):
        expected = dllm.speculate(model, None, prompt, max_new_tokens=8, **how)
        result = dllm.speculate(model, part, prompt, max_new_tokens=8, **how)
        assert result.tokens == expected.tokens


NO_DRAFTS: dict[str, tuple[Draft, str]] = {
    "negative": (Draft(np.array([5, -1])), "token ids below"),
    "beyond": (Draft(np.array([2**40])), "token ids below"),
    "fractions": (Draft(np.array([5.0])), "token ids below"),
    "circle": (Draft(np.array([5, 6]), np.array([1, 0])), "one before it"),
    "few parents": (Draft(np.array([5, 6]), np.array([-1])), "one before it"),
    "no q": (Draft(np.array([5]), None, Distribution.MARGINALS), "finite log_q"),
    "broken q": (
        Draft(np.array([5]), None, Distribution.MARGINALS, np.full((1, 526), np.nan)),
        "finite log_q",
    ),
}


@pytest.mark.parametrize("name", NO_DRAFTS)
def test_what_is_no_draft_fails_its_own_text_before_a_forward(
    verifier: dllm.DiffusionModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU an id that is none would end the texts beside it, too."""
    expected = dllm.speculate(verifier, None, [4, 5], max_new_tokens=4).tokens
    draft, error = NO_DRAFTS[name]
    drafter, score = Scripted(), PackedVerifier.score
    monkeypatch.setattr(drafter, "propose_all", lambda work: [draft] * len(work))

    def checked(self: PackedVerifier, work: Any) -> Any:
        assert not any(len(one) for _, one in work)
        return score(self, work)

    monkeypatch.setattr(PackedVerifier, "score", checked)
    with dllm.Session(verifier) as session:
        one = session.submit([4, 5], drafter=drafter, max_new_tokens=4)
        other = session.submit([4, 5], max_new_tokens=4)
        with pytest.raises(dllm.ConfigError, match=error):
            one.result(60)
        assert other.result(60).tokens == expected


def test_a_drafter_may_write_to_what_it_is_shown(verifier: dllm.DiffusionModel) -> None:
    class Careless(Scripted):
        def open(self, request: DraftRequest) -> Drafting:
            request.prompt[:] = 3
            drafting = super().open(request)
            drafting.propose = lambda prefix, budget: prefix.fill(3) or Draft([5, 6])  # type: ignore
            return drafting

    expected = dllm.speculate(verifier, None, [4, 5], max_new_tokens=6).tokens
    assert dllm.speculate(verifier, Careless(), [4, 5], max_new_tokens=6).tokens == expected
