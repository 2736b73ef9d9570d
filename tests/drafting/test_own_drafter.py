"""The drafter of examples/own_drafter.py drafts, and leaves the text alone."""

import runpy
from pathlib import Path

import dllm

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
