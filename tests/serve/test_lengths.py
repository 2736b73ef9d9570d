"""Answers of a length that is found, and holes that are measured, behind HTTP."""

import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

import dllm
from dllm.core.canvas import Edit
from dllm.serve import service as serving

from .conftest import Served, Start, sse

HELLO = [{"role": "user", "content": "one two three"}]
CHAT = "/v1/chat/completions"
DAEDAL = "daedal(initial=16, low=0.3, enough=0.2)"
OTHERS = ["append(block=8)"]


def written(frames: list[dict[str, Any]], piece: Any) -> list[str]:
    """The answer as frames of a canvas tell it, edits applied in turn."""
    opening, *steps = frames
    cells: list[str | None] = [None] * opening["length"]
    for step in steps:
        for values in step.get("edits", ()):
            edit = Edit(*values)
            new = None if edit.token is None else piece(edit.token)
            cells[edit.at : edit.at + edit.removed] = [new] * edit.added
        for at, text, *_ in step["commit"]:
            cells[at] = text
        for at in step["remask"]:
            cells[at] = None
        del cells[step.get("end", len(cells)) :]
    assert None not in cells
    return [text for text in cells if text is not None]


@pytest.mark.parametrize(
    "length", [DAEDAL, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_streamed_text_stays_and_frames_carry_edits(
    served: Served, tiny: dllm.DiffusionModel, length: str
) -> None:
    how: dict[str, Any] = {"block_length": 8, "length": length, "sampler": "threshold(tau=0.4)"}
    plain = dllm.generate(tiny, HELLO, max_new_tokens=40, **how)
    body = {"messages": HELLO, "max_tokens": 40, "stream": True, **how,
            "stream_options": {"include_drafts": True, "include_usage": True}}  # fmt: skip
    chunks = sse(served.post(CHAT, body).text)
    pieces = [c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]]
    assert "".join(pieces) == plain.text
    frames = [chunk["dllm"] for chunk in chunks if chunk.get("dllm", {}).get("type")]
    piece = served.service.spelling.piece
    assert written(frames, piece)[: len(plain.tokens)] == [piece(t) for t in plain.tokens]
    assert any(frame.get("edits") for frame in frames[1:])
    last = chunks[-1]
    assert last["usage"]["completion_tokens"] == len(plain.tokens)
    assert (last["dllm"]["forwards"], last["dllm"]["probes"]) == (plain.nfe, plain.probes)
    ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
    assert ends[-1] == plain.finish_reason
    whole = served.post(CHAT, {"messages": HELLO, "max_tokens": 40, **how}).json()
    assert whole["choices"][0]["message"]["content"] == plain.text


def test_a_server_with_a_length(start: Start, tiny: dllm.DiffusionModel) -> None:
    """``serve --length``: a default, which a body replaces; one that cannot work ends the start."""
    served = start(tiny, length="append(block=8)", caches=("dual",))
    body = {"messages": HELLO, "max_tokens": 24, "block_length": 8}
    for more in ({}, {"length": "fixed"}):
        plain = dllm.generate(tiny, HELLO, max_new_tokens=24, block_length=8, cache="dual",
                              length=more.get("length", "append(block=8)"))  # fmt: skip
        answer = served.post(CHAT, body | more).json()
        assert answer["choices"][0]["message"]["content"] == plain.text
        assert answer["dllm"]["computed"] == plain.computed
    refused = served.post(CHAT, body | {"length": "daedal"})
    assert refused.status_code == 400 and "daedal needs a forward" in refused.text
    for length, message in (("grow", "unknown length"), ("daedal", "daedal needs")):
        with pytest.raises(dllm.DllmError, match=message):
            start(tiny, length=length, caches=("dual",))


@pytest.mark.slow
def test_rows_are_admitted_by_what_they_use(start: Start, tiny: dllm.DiffusionModel) -> None:
    """Four answers of up to 40 tokens in a pool of 120 positions: two at a time where they
    reserve their cap, all where they hold what they have; the pool is empty afterwards."""
    most = {}
    for length in ("fixed", "append(block=8, lookahead=0)"):
        served = start(tiny, length=length, caches=("dual",), max_positions=120, max_batch_size=16)
        body = {"messages": HELLO, "max_tokens": 40, "block_length": 8, "n": 4,
                "temperature": 0.5, "seed": 1}  # fmt: skip
        session, reports = served.service.sessions["dual"], list[Any]()
        session.observe = reports.append
        answer = served.post(CHAT, body).json()
        plain = dllm.generate(tiny, HELLO, max_new_tokens=40, block_length=8, cache="dual", n=4,
                              temperature=0.5, seed=1, length=length)  # fmt: skip
        got = [choice["message"]["content"] for choice in answer["choices"]]
        assert got == [result.text for result in plain]
        most[length] = max(report.rows for report in reports)
        assert session.positions == 120 and session.positions_used == 0
    assert most["fixed"] == 2 and most["append(block=8, lookahead=0)"] == 4


# -- holes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_holes_of_unknown_length(start: Start, nano: dllm.DiffusionModel, stream: bool) -> None:
    served = start(nano)
    text = "23 + 12: 3 + 2 =[[*]], 2 + 1 =[[1..4]]:[[2]]."
    plain = dllm.infill(nano, text, prompt="What is 23 + 12?")
    body = {"text": text, "prompt": "What is 23 + 12?", "stream": stream}
    if stream:
        *chunks, last = sse(
            served.post("/v1/infill", body | {"stream_options": {"include_usage": True}}).text
        )
        ending = chunks[-1]["choices"][0]
        assert "".join(c["choices"][0]["text"] for c in chunks) == plain.text
    else:
        last = served.post("/v1/infill", body).json()
        ending = last["choices"][0]
        assert ending["text"] == plain.text
    assert ending["holes"] == plain.holes and len(plain.holes) == 3
    assert ending["finish_reason"] == "stop"
    assert last["usage"]["completion_tokens"] == plain.decided
    assert last["dllm"]["probes"] == plain.probes > 0
    assert (last["dllm"]["forwards"], last["dllm"]["computed"]) == (plain.nfe, plain.computed)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "a [[*]] b", "length": "append"}, "length of holes"),
        ({"text": "a [[2]] b", "length": "append"}, "length of holes"),
        ({"text": "a [[9..4]] b"}, "shortest length first"),
        ({"text": "a" + " [[*]] b" * 17}, "at most 16 holes"),
    ],
)
def test_holes_that_are_refused(served: Served, body: dict[str, Any], message: str) -> None:
    answer = served.post("/v1/infill", body)
    assert answer.status_code == 400 and message in json.loads(answer.text)["error"]["message"]


def test_holes_are_measured_in_spare_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While others' texts are written, a probe is followed by a pause of some times its length."""
    body = {"text": "one [[1..8]] two [[1..8]]"}
    pauses, count = list[float](), itertools.count()

    def monotonic() -> float:  # at least so much passes between two looks
        return time.monotonic() + 0.01 * next(count)

    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=monotonic, sleep=pauses.append))
    plain = served.post("/v1/infill", body).json()["choices"]
    assert not pauses
    monkeypatch.setattr(serving.Service, "running", 1)
    assert served.post("/v1/infill", body).json()["choices"] == plain
    assert len(pauses) > 1
    assert all(serving.OTHERS * 0.01 <= one <= serving.LONGEST_PAUSE for one in pauses)
