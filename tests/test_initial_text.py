"""Answers that begin as a draft."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import dllm
from tests.cli.conftest import Run
from tests.cli.conftest import cli as cli
from tests.serve.conftest import Start, sse
from tests.serve.conftest import start as start

PROMPTS = ["one two three", "four five"]
HOW: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8, "sampler": "threshold(tau=0.4)"}


def outcome(result: dllm.Result) -> tuple[Any, ...]:
    return result.tokens, result.order, result.nfe, result.computed, result.finish_reason


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_all_of_a_draft_masked_is_no_draft(tiny: dllm.DiffusionModel, cache: str) -> None:
    plain = dllm.generate(tiny, PROMPTS, cache=cache, **HOW)
    for how in (
        {"initial_text": list(range(24)), "remask": [(0, 24)]},
        {"initial_text": [-1] * 20},
    ):
        drafted = dllm.generate(tiny, PROMPTS, cache=cache, **how, **HOW)
        assert [outcome(r) for r in drafted] == [outcome(r) for r in plain]


def test_a_draft_with_open_positions_is_filled_like_holes(tiny: dllm.DiffusionModel) -> None:
    """Where nothing ends, against `infill` of the same ids, whose region is the same."""
    model = replace(tiny, facts=replace(tiny.facts, stop_token_ids=()))
    ids = np.arange(10, 34)
    ids[[0, 1, 7, 12, 13, 14, 23]] = -1
    how = {key: value for key, value in HOW.items() if key != "max_new_tokens"}
    for cache in ("none", "dual"):
        holes = dllm.infill(model, ids, prompt=PROMPTS[0], cache=cache, **how)
        draft = dllm.generate(
            model, PROMPTS[0], initial_text=ids, cache=cache, eos_policy="none", **how
        )
        assert outcome(draft)[:4] == outcome(holes)[:4]
        assert draft.decided == 7 and draft.order.count(-1) == 17
    assert ids.min() == -1 and ids[2] == 12  # the caller's array is left alone


def test_masks_among_ids_are_open(tiny: dllm.DiffusionModel) -> None:
    mask, how = tiny.facts.mask_token_id, {**HOW, "eos_policy": "none"}
    open_, masks = [10, -1, 12, -1, -1], [10, mask, 12, mask, mask]
    for first in (open_, masks):
        filled = dllm.infill(tiny, first, sampler="threshold(tau=0.4)")
        assert filled.tokens[::2][:2] == [10, 12] and mask not in filled.tokens
    drafted = [dllm.generate(tiny, "one", initial_text=ids, **how) for ids in (open_, masks)]
    assert outcome(drafted[0]) == outcome(drafted[1])


def test_an_answer_is_edited_and_extended() -> None:
    """On the bundled model: its own answer with a wrong sum, mended where it is masked."""
    question = "What is 23 + 12?"
    right = dllm.generate("nano", question, block_length=8).text
    assert " 35" in right
    wrong = right.replace(" 35", "[[2]]")
    assert dllm.generate("nano", question, initial_text=wrong, block_length=4).text == right
    begun = right[: len(right) // 2]
    longer = dllm.generate("nano", question, initial_text=begun, max_new_tokens=64, block_length=8)
    assert longer.text.startswith(begun) and longer.finish_reason == "stop"
    events = [*dllm.stream("nano", question, initial_text=begun, max_new_tokens=64, block_length=8)]
    assert "".join(event.text for event in events) == longer.text


@pytest.mark.parametrize("hole", ["[[*]]", "[[2..4]]", "[[3:[a-z]+]]", "[[*:[a-z]+]]"])
def test_holes_that_a_draft_cannot_have(tiny: dllm.DiffusionModel, hole: str) -> None:
    with pytest.raises(dllm.DllmError, match="infill takes those"):
        dllm.generate(tiny, PROMPTS[0], initial_text=f"one {hole} two", max_new_tokens=32)


def test_drafts_of_several_prompts_and_of_sessions(tiny: dllm.DiffusionModel) -> None:
    """One for all or one each; a row does not depend on the others; revisers may change it."""
    drafts = [[20, 21, 22, 23], [30, -1, 32]]
    for sampler in ("threshold(tau=0.4)", "remdm"):
        how = HOW | {"sampler": sampler, "remask": [1]}
        alone = [
            dllm.generate(tiny, prompt, initial_text=draft, **how)
            for prompt, draft in zip(PROMPTS, drafts, strict=True)
        ]
        together = dllm.generate(tiny, PROMPTS, initial_text=drafts, **how)
        with dllm.Session(tiny) as session:
            handles = [
                session.submit(p, initial_text=d, **how)
                for p, d in zip(PROMPTS, drafts, strict=True)
            ]
            served = [handle.result(timeout=60) for handle in handles]
        for results in (together, served):
            assert [outcome(r) for r in results] == [outcome(r) for r in alone]
    plain = dllm.generate(tiny, PROMPTS, initial_text=[5, 6], **HOW)
    assert [result.tokens[:2] for result in plain] == [[5, 6]] * 2


@pytest.mark.parametrize(
    ("how", "tokens"),
    [
        ({"length": "append(block=4)", "max_new_tokens": 16}, 16),
        ({"initial_text": list(range(10, 34)), "max_new_tokens": 24}, 24),
        ({"remask": [(2, 5)]}, 9),
        ({"remask": [2], "max_new_tokens": 12}, 12),
        ({"constraints": {3: 77}, "max_new_tokens": 12}, 12),
    ],
)
def test_with_other_arguments(tiny: dllm.DiffusionModel, how: dict[str, Any], tokens: int) -> None:
    """What is left of a draft stays; an answer that is open within it is as long as it is."""
    model = replace(tiny, facts=replace(tiny.facts, stop_token_ids=()))
    how = {"initial_text": list(range(10, 19)), "sampler": "threshold(tau=0.4)"} | how
    result = dllm.generate(model, PROMPTS[0], **how)
    assert len(result.tokens) == tokens
    open_ = {i for low, high in ((a, a + 1) if isinstance(a, int) else a
             for a in how.get("remask", ())) for i in range(low, high)}  # fmt: skip
    for i, token in enumerate(how["initial_text"]):
        if i not in open_ and i not in how.get("constraints", {}):
            assert result.tokens[i] == token
    if len(how["initial_text"]) == 24:
        assert result.nfe == 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"remask": [1]}, "pass initial_text"),
        ({"initial_text": [1, 2], "remask": [2]}, "position 2, and initial_text has 2 tokens"),
        ({"initial_text": [1, 2], "remask": "1"}, "remask is a list"),
        ({"initial_text": [1, 2], "remask": [(2, 1)]}, "the first before the last"),
        ({"initial_text": [1, 2], "remask": [-1]}, "at least 0"),
        ({"initial_text": [1, 2], "remask": [True]}, "whole number"),
        ({"initial_text": [1, 2], "remask": [(1, 2, 3)]}, "pairs"),
        ({"initial_text": 5}, "a text or token ids"),
        ({"initial_text": [1] * 9, "max_new_tokens": 8}, "initial_text has 9 tokens"),
        ({"initial_text": [1] * 900}, "initial_text has 900 tokens"),
        ({"initial_text": [1, 10**6]}, "outside the vocabulary"),
        ({"initial_text": ["a", "b"]}, "all prompts, 1 here, or a list of as many, not of 2"),
        ({"initial_text": [1, 2], "regex": "[a-z]+", "max_new_tokens": 2}, "no text of"),
    ],
)
def test_drafts_that_are_none(tiny: dllm.DiffusionModel, how: dict[str, Any], message: str) -> None:
    with pytest.raises(dllm.DllmError, match=message):
        dllm.generate(tiny, PROMPTS[0], **how)


def test_holes_have_no_draft(tiny: dllm.DiffusionModel) -> None:
    with pytest.raises(dllm.DllmError, match="drop initial_text"):
        dllm.infill(tiny, "one [[2]]", initial_text="two")
    with pytest.raises(dllm.DllmError, match="initial_text"):
        dllm.speculate("nano-ar", None, "one", initial_text="two")


@pytest.mark.slow
def test_on_the_command_line_and_the_server(cli: Run, start: Start) -> None:
    question, draft = "What is 23 + 12?", "23 + 12: 3 + 2 = 9, 2 + 1 = 3: 35."
    plain = dllm.generate("nano", question, initial_text=draft, remask=[4, (7, 9)])
    done = cli("generate", question, "--initial-text", draft, "--remask", "4,7..9")
    assert done.stdout.strip() == plain.text
    refused = cli("generate", question, "--initial-text", draft, "--remask", "x")
    assert refused.exit_code == 2 and "--remask is a list of positions" in refused.stderr
    served = start(dllm.load("nano"))
    body = {"messages": [{"role": "user", "content": question}], "initial_text": draft}
    answer = served.post("/v1/chat/completions", body | {"remask": [4, [7, 9]]}).json()
    assert answer["choices"][0]["message"]["content"] == plain.text
    assert answer["usage"]["completion_tokens"] == plain.decided == 3
    how = body | {"stream": True, "stream_options": {"include_drafts": True}}
    chunks = sse(served.post("/v1/chat/completions", how | {"remask": [4, [7, 9]]}).text)
    opening = next(c["dllm"] for c in chunks if c.get("dllm", {}).get("type") == "canvas")
    assert opening["length"] == len(opening["given"]) + 3  # what is left of the draft is shown
    for wrong in ({"remask": "4"}, {"remask": [[4]]}, {"initial_text": 4}, {"initial_text": ["a"]}):
        assert served.post("/v1/chat/completions", body | wrong).status_code == 400
