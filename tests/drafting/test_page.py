"""The example of docs/drafters.md runs, drafts, and leaves the text alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import dllm

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"


def test_the_example_drafts_for_the_verifier() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    plain = dllm.speculate("nano-ar", None, "Compute 69 + 49.", max_new_tokens=32)
    assert names["out"].tokens == plain.tokens
    assert names["out"].accepted > 20  # the assistant is the verifier itself
    model, part = dllm.load("nano-ar"), names["Assistant"](names["small"])
    prompt = "Reverse this list: Tom, Anna, Ben"
    for how in ({"temperature": 1.0, "seed": 1}, {"controller": "fixed(k=3)"}):
        expected = dllm.speculate(model, None, prompt, max_new_tokens=16, **how)
        result = dllm.speculate(model, part, prompt, max_new_tokens=16, **how)
        assert result.tokens == expected.tokens
