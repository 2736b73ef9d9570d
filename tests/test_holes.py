"""Holes of a text that does not say how long they are."""

import random
import re
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.core.text import LONGEST_FORM, hole_forms
from dllm.engine.forward import Forward
from dllm.engine.loop import CPU_BATCH
from dllm.engine.rows import Job
from dllm.request.holes import measured
from dllm.request.prompts import encode, without_forms

QUESTION = "What is 23 + 12?"


def test_a_length_is_taken_from_the_texts_that_are_compared() -> None:
    """Mean probability of the proposals in the hole, text by text, against the network itself."""
    model = dllm.load("nano")
    before = encode(model, QUESTION)
    left, right = "23 + 12: 3 + 2 = 5, 2 + 1", "3: 35."
    sure = {}
    for n in range(1, 7):
        one = measured(model, f"{left}[[{n}]]{right}", before)
        assert one.probes == 0
        ids = np.concatenate([before, np.where(one.holes, model.facts.mask_token_id, one.ids)])
        with torch.inference_mode():
            logits = model.hf(torch.from_numpy(ids)[None]).logits[0].double()
            banned = [*model.facts.stop_token_ids, model.facts.mask_token_id]
            logits[:, banned] = -torch.inf
            best = logits.softmax(-1).amax(-1)[len(before) :][torch.from_numpy(one.holes)]
        sure[n] = float(best.mean())
    found = measured(model, f"{left}[[1..6]]{right}", before)
    assert int(found.holes.sum()) == max(sure, key=sure.__getitem__)
    assert found.computed == sum(len(before) + len(found.ids) - int(found.holes.sum()) + n
                                 for n in sure)  # fmt: skip
    assert found.probes == 1


def test_a_probe_is_no_longer_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server measures between the steps of others: they wait for one of its forwards at a time.
    How the candidates are cut changes nothing."""
    forwards, pauses, launch = list[int](), list[int](), Forward.launch

    def counted(self: Forward, jobs: list[Job]) -> Any:
        forwards.append(sum(job.size for job in jobs))
        return launch(self, jobs)

    monkeypatch.setattr(Forward, "launch", counted)
    model, text, before = dllm.load("nano"), "a[[*]]b[[*]]", np.full(150, 9)
    cut = measured(model, text, before, before_forward=lambda: pauses.append(1))
    assert len(forwards) == len(pauses) > cut.probes and max(forwards) <= CPU_BATCH
    monkeypatch.setattr("dllm.request.holes.CPU_BATCH", 10**6)
    whole = measured(model, text, before)
    assert (whole.sizes, whole.computed) == (cut.sizes, cut.computed)


def test_holes_are_measured_and_filled() -> None:
    text = "23 + 12: 3 + 2 =[[1]], 2 + 1 =[[*]]: 35."
    result = dllm.infill("nano", text, prompt=QUESTION)
    assert result.text.startswith("23 + 12: 3 + 2 = 5, 2 + 1 =") and result.text.endswith(": 35.")
    assert 1 <= result.probes <= 2 and result.nfe > result.probes
    with dllm.Session("nano") as session:
        again = session.infill(text, prompt=QUESTION, length="sure").result(timeout=60)
    assert (again.text, again.nfe, again.computed) == (result.text, result.nfe, result.computed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a [[8..4]]", "shortest length first"),
        ("a [[0..4]]", "from 1"),
        ("a [[4000..5000]]", "the context has room for"),
        ("a [[x]]", "no hole"),
        ("a [[*:[0-9]+]] b", "says how many tokens it has"),
        ("a [[4]] b [[2..4:[0-9]+]]", "says how many tokens it has"),
    ],
)
def test_holes_that_are_none(text: str, message: str) -> None:
    with pytest.raises(dllm.DllmError, match=message):
        dllm.infill("nano", text)


def test_an_unknown_rule() -> None:
    with pytest.raises(dllm.DllmError, match="length of holes"):
        dllm.infill("nano", "a [[*]]", length="append")


def test_a_range_that_the_context_does_not_hold_is_refused(tiny: dllm.DiffusionModel) -> None:
    model = tiny
    with pytest.raises(dllm.PromptError, match=r"\[\[1\.\.100000\]\]: the context has room for"):
        dllm.infill(model, "a [[1..100000]] b")
    before = np.full(model.facts.context_length - 24, 9)
    room = model.facts.context_length - len(before)
    holes = measured(model, f"[[1..{room - 4}]][[4..4]]", before)
    assert len(holes.ids) <= room
    with pytest.raises(dllm.PromptError, match=f"room for {room - 4} tokens there: lower it"):
        measured(model, f"[[1..{room - 3}]][[4..4]]", before)
    assert dllm.infill(model, "a [[2]] b").finish_reason == "stop"


def test_holes_are_found_as_an_expression_finds_them() -> None:
    """One whose search is quadratic."""
    sized = re.compile(rf"\[\[(\d+)(?::(.{{1,{LONGEST_FORM}}}?))?\]\](?!\])")
    every = re.compile(rf"{sized.pattern}|\[\[(?:\*|\d+\.\.\d+)\]\]")
    parts = ["[[", "[[8", "[[8:", "]]", "]", "[", "a", ":", "[[*]]", "[[1..3]]", "0", "\n"]
    rng, found = random.Random(0), 0
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randint(1, 12)))
        forms = [form or None for size, form in every.findall(text) if not size or int(size)]
        assert hole_forms(text) == forms, text
        assert without_forms(text) == sized.sub(r"[[\1]]", text), text
        found += any(forms)
    assert found > 100
    for more in (0, 1):
        long = "[[8:" + "a" * (LONGEST_FORM + more) + "]]"
        assert len(hole_forms(long)) == 1 - more == len(every.findall(long))


@pytest.mark.parametrize("text", ["23 + 12: 3 + 2 =[[1]]: 2 + 1 =[[8]].", "Tom has[[24]]. Tom"])
def test_a_stop_string_ends_the_last_hole_and_what_is_behind_it(text: str) -> None:
    """Also where the same stands before it, or behind: what is not written any more costs
    nothing."""
    model = dllm.load("nano")
    how: dict[str, Any] = {"sampler": "llada", "block_length": 8}
    plain = dllm.infill(model, text, **how)
    for stop in (plain.holes[-1][3:5], plain.holes[-1][-2:], ".", "Tom", "nowhere"):
        hole = plain.holes[-1].partition(stop)[0]
        cut = dllm.infill(model, text, stop_strings=["nowhere", stop], **how)
        assert cut.holes == [*plain.holes[:-1], hole] and cut.finish_reason == "stop"
        if hole == plain.holes[-1]:
            assert cut.text == plain.text and cut.tokens == plain.tokens
        else:
            assert plain.text.startswith(cut.text) and cut.text.endswith(hole)
            assert cut.tokens == plain.tokens[: len(cut.tokens)] and cut.nfe <= plain.nfe
        with dllm.Session(model, sampler="llada") as session:
            told = session.infill(text, stop_strings=stop, block_length=8)
            assert "".join(event.text for event in told) == cut.text
    if plain.decided > 8:  # a block
        assert dllm.infill(model, text, stop_strings=plain.holes[-1][1], **how).nfe < plain.nfe
