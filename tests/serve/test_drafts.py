"""``/v1/draft``: what becomes of messages that are wrong, and of a model that also writes."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

import dllm
from dllm.drafting.vocabulary import fingerprint

from .conftest import PATIENCE, Served


def opening(model: dllm.DiffusionModel, **more: Any) -> dict[str, Any]:
    return {
        "sid": "a", "vocabulary": fingerprint(model.tokenizer, model.facts.vocab_size),
        "prompt": [1, 2, 3], "vocab_size": model.facts.vocab_size, "stop_ids": [], "limit": 40,
        "temperature": 0.0, "noise_key": [0, 0], "draft_key": [0, 3], **more,
    }  # fmt: skip


def test_a_model_that_writes_also_drafts(served: Served, tiny: dllm.DiffusionModel) -> None:
    assert served.post("/v1/draft/open", opening(tiny)).json() == {"sid": "a"}
    message = {"sid": "a", "base_len": 3, "commit": [], "k": 4, "deadline_ms": 20_000}
    draft = served.post("/v1/draft/draft", message).json()
    assert draft["base_len"] == 3 and 0 < len(draft["tokens"]) <= 4
    again = {**message, "base_len": 5, "commit": draft["tokens"][:2]}
    if len(draft["tokens"]) >= 2:
        assert served.post("/v1/draft/draft", again).status_code == 200
    assert served.post("/v1/draft/close", {"sid": "a", "commit": []}).status_code == 200


@pytest.mark.parametrize(
    ("action", "message", "status", "code"),
    [
        ("open", {}, 400, None),
        ("open", {"vocabulary": "another"}, 409, "other_vocabulary"),
        ("open", [], 400, "invalid_body"),
        ("draft", {"sid": "unknown", "base_len": 3, "commit": [], "k": 2}, 400, None),
        ("draft", {"sid": "x", "deadline_ms": 0}, 504, "late"),
        ("draft", {"sid": "x", "deadline_ms": "soon"}, 400, None),
        ("draft", {"sid": "x", "deadline_ms": None}, 400, None),
        ("nothing", {}, 400, None),
    ],
)
def test_wrong_messages(
    served: Served, action: str, message: Any, status: int, code: str | None
) -> None:
    answer = served.post(f"/v1/draft/{action}", message)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    assert answer.json()["error"]["message"]


def test_fuzzed_messages(served: Served, tiny: dllm.DiffusionModel) -> None:
    rng = random.Random(9)
    values = [None, -1, 0, 3, 10**9, 10**30, 0.5, "", "x", [], [1], [-1], [None], {}, True, 1e308]
    right = {**opening(tiny), "base_len": 3, "commit": [], "k": 2, "deadline_ms": 2000, "w": 4}
    with httpx.Client(base_url=served.url, timeout=PATIENCE) as client:
        for _ in range(150):
            message = dict(right)
            for _ in range(rng.randint(1, 3)):
                message[rng.choice([*right])] = rng.choice(values)
            action = rng.choice(["open", "draft", "close"])
            answer = client.post(f"/v1/draft/{action}", json=message)
            assert answer.status_code in (200, 400, 409, 504), (answer.text, message)
