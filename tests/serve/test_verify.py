"""A served autoregressive model: with a drafter of the server, and for devices that draft."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import dllm
from dllm.drafting.device import write_with
from dllm.drafting.length.lengths import Fixed
from dllm.drafting.naming import make_drafter
from dllm.drafting.vocabulary import fingerprint
from dllm.serve.bodies import DeviceBody, DraftBody
from dllm.serve.reading import Reader
from dllm.serve.verify import VerifyRoutes
from tests.drafting.conftest import Scripted, make_verifier

from ..thin import some
from .conftest import PATIENCE, Served, idle, serve, sse, until

NEW = 20


@pytest.fixture(scope="module")
def verifier() -> dllm.DiffusionModel:
    return make_verifier("full")


@pytest.fixture(scope="module")
def verifying(verifier: dllm.DiffusionModel) -> Iterator[Served]:
    result = serve(verifier, drafters=("prompt_lookup",), name="ar", max_batch_size=4)
    yield result
    until(lambda: idle(result))
    assert not result.service.verifying.texts
    result.stop()


def opening(model: dllm.DiffusionModel) -> dict[str, Any]:
    """What a device says first."""
    vocabulary = fingerprint(model.tokenizer, model.facts.vocab_size)
    return {"vocabulary": vocabulary, "prompt": [5, 6, 7], "max_new_tokens": 8}


def plain(model: dllm.DiffusionModel, prompt: list[int], **how: Any) -> list[int]:
    tokens: list[int] = dllm.speculate(model, None, prompt, max_new_tokens=NEW, **how).tokens
    return tokens


def test_penalties_and_biases(verifying: Served, verifier: dllm.DiffusionModel) -> None:
    """As OpenAI defines them, of what is written; greedy decoding by hand is the oracle."""
    prompt = [5, 6, 7, 5, 6, 7]
    body = {"prompt": prompt, "max_tokens": 12, "return_token_ids": True, "ignore_eos": True}

    def written(**how: Any) -> list[int]:
        answer = verifying.post("/v1/completions", body | how)
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    def by_hand(frequency: float, presence: float, bias: dict[int, float]) -> list[int]:
        ids = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                logits = verifier.hf(input_ids=torch.tensor([ids])).logits[0, -1].clone()
            for token, more in bias.items():
                logits[token] += more
            for stop in verifier.facts.stop_token_ids:
                logits[stop] = -torch.inf
            counts = torch.bincount(torch.tensor(ids[6:], dtype=torch.int64), minlength=len(logits))
            ids.append(int((logits - frequency * counts - presence * (counts > 0)).argmax()))
        return ids[6:]

    plain = written()
    assert plain == by_hand(0, 0, {})
    for frequency, presence, bias in ((2, 0, {}), (0, 2, {}), (1, 1.5, {plain[0]: -50.0})):
        sent = {str(token): more for token, more in bias.items()}
        how = {"frequency_penalty": frequency, "presence_penalty": presence, "logit_bias": sent}
        assert written(**how) == by_hand(frequency, presence, bias)
    how = {"max_new_tokens": 12, "min_new_tokens": 12, "repetition_penalty": 1.5}
    alone = dllm.speculate(verifier, None, prompt, **how)
    assert written(repetition_penalty=1.5) == alone.tokens


@pytest.mark.parametrize("how", some([{"temperature": 0.8, "seed": 3}, {}], 1))
def test_completions_are_the_verifiers_own(
    verifying: Served, verifier: dllm.DiffusionModel, how: dict[str, Any]
) -> None:
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 7], [4, 4, 4, 4]]
    bodies = [
        {"prompt": prompt, "max_tokens": NEW, "return_token_ids": True, "n": 2, **how}
        for prompt in prompts
    ]
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda body: verifying.post("/v1/completions", body).json(), bodies)
    for prompt, answer in zip(prompts, answers, strict=True):
        both = dllm.speculate(verifier, None, [prompt] * 2, max_new_tokens=NEW, **how)
        assert [choice["token_ids"] for choice in answer["choices"]] == [r.tokens for r in both]
        assert [choice["text"] for choice in answer["choices"]] == [r.text for r in both]


def test_drafted_and_accepted_tokens_are_counted(
    verifying: Served, verifier: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an answer adds to the counters is what `dllm.speculate` says of the same text."""
    labels = {"model_name": verifying.service.name}

    def counted() -> list[float]:
        registry = verifying.service.metrics.registry
        names = ("drafts", "drafted_tokens", "accepted_tokens")
        values = [registry.get_sample_value(f"dllm_{name}_total", labels) for name in names]
        return [float(value or 0) for value in values]

    session: Any = verifying.service.sessions["none"]
    monkeypatch.setitem(session._make.args[1], "controller", Fixed(3))  # the default may rest
    prompt = [5, 6, 7, 5, 6, 7, 5]
    before = counted()
    verifying.post("/v1/completions", {"prompt": prompt, "max_tokens": NEW})
    drafts, drafted, accepted = (b - a for a, b in zip(before, counted(), strict=True))
    row = dllm.speculate(
        verifier, "prompt_lookup", prompt, max_new_tokens=NEW, controller="fixed(k=3)"
    )
    drafted_rounds = sum(1 for round_ in row.rounds if round_.drafted)
    assert (drafts, drafted, accepted) == (drafted_rounds, row.drafted, row.accepted)
    assert drafts > 0
    assert "dllm_accepted_tokens_total" in verifying.get("/metrics").text


def test_streams_and_refusals(verifying: Served, verifier: dllm.DiffusionModel) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": NEW, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    chunks = sse(verifying.post("/v1/completions", body).text)
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == dllm.speculate(verifier, None, [5, 6, 7], max_new_tokens=NEW).text
    off = verifying.post("/v1/completions", {**body, "cfg_scale": 0, "stream": False,
                                             "stream_options": None})  # fmt: skip
    assert off.json()["choices"][0]["text"] == text
    for more, word in (
        ({"cfg_scale": 0.5}, "cfg_scale is for diffusion"),
        ({"sampler": "llada"}, "sampler"), ({"suffix": "x"}, "holes"),
        ({"steps": 3}, "steps is for diffusion"), ({"remask": [1]}, "remask opens tokens"),
        ({"stream_options": {"include_drafts": True}}, "autoregressive"),
    ):  # fmt: skip
        refused = verifying.post("/v1/completions", {**body, **more})
        assert refused.status_code == 400 and word in refused.json()["error"]["message"]


@pytest.mark.parametrize("how", some([{"temperature": 0.8, "seed": 5}, {}], 1))
def test_devices_get_the_verifiers_own_text(
    verifying: Served, verifier: dllm.DiffusionModel, how: dict[str, Any]
) -> None:
    """Three devices at once: one drafts what will be written, one looks up, one drafts nonsense."""
    prompt = [5, 6, 7, 8]
    wanted = plain(verifier, prompt, **how)
    drafters = [Scripted([*prompt, *wanted], k=4), make_drafter("prompt_lookup"),
                Scripted([*prompt, *[3] * NEW], k=4)]  # fmt: skip

    def write(drafter: Any) -> list[list[int]]:
        return [*write_with(
            verifying.url, drafter, np.asarray(prompt), tokenizer=verifier.tokenizer, length=4,
            max_new_tokens=NEW, **how,
        )]  # fmt: skip

    with ThreadPoolExecutor() as pool:
        rounds = [*pool.map(write, drafters)]
    for one in rounds:
        assert [token for tokens in one for token in tokens] == wanted
    assert len(rounds[0]) <= -(-len(wanted) // 5) + 1 < len(rounds[2])


def test_many_devices_share_forwards(verifier: dllm.DiffusionModel) -> None:
    """Steps that come while the forward of one runs are scored by the next one, together."""
    served = serve(verifier, name="ar")
    sizes: list[int] = []
    session: Any = served.service.sessions["none"]
    verifier_at_work = session._scheduler.engine.verifier
    score, gate = verifier_at_work.score, threading.Event()

    def slowly(work: Any) -> Any:
        sizes.append(len(work))
        gate.wait(PATIENCE)
        return score(work)

    def opened() -> str:
        sid: str = served.post("/v1/verify/open", opening(verifier)).json()["sid"]
        return sid

    def one(sid: str) -> None:
        message = {"sid": sid, "base_len": 3, "tokens": [4, 5]}
        assert served.post("/v1/verify/step", message).status_code == 200
        assert served.post("/v1/verify/close", {"sid": sid}).status_code == 200

    one(opened())  # whatever is tried at the first forward of a network has been tried
    verifier_at_work.score = slowly
    threads = [threading.Thread(target=one, args=(opened(),)) for _ in range(6)]
    threads[0].start()
    until(lambda: sizes)
    for thread in threads[1:]:
        thread.start()
    texts = served.service.verifying.texts
    until(lambda: sum(text.news is not None for text in texts.values()) == 6)
    gate.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert sizes == [1, 5]
    assert not texts
    served.stop()


def test_an_answer_that_comes_too_late_stops_nobody(
    verifier: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is told so, and the others' texts go on."""
    monkeypatch.setattr("dllm.serve.verify.PATIENCE", 0.3)
    served = serve(verifier, name="ar")
    session: Any = served.service.sessions["none"]
    verifier_at_work = session._scheduler.engine.verifier
    score, begun, gate = verifier_at_work.score, threading.Event(), threading.Event()

    def slowly(work: Any) -> Any:
        begun.set()
        gate.wait(PATIENCE)
        return score(work)

    late, other = (
        {"sid": served.post("/v1/verify/open", opening(verifier)).json()["sid"], "base_len": 3,
         "tokens": [4, 5]} for _ in range(2)
    )  # fmt: skip
    verifier_at_work.score = slowly
    assert served.post("/v1/verify/step", late).status_code == 504
    assert begun.is_set()
    assert served.post("/v1/verify/open", opening(verifier)).status_code == 200  # no forward
    again = served.post("/v1/verify/step", late)
    assert again.status_code == 400 and "being verified" in again.text
    monkeypatch.setattr("dllm.serve.verify.PATIENCE", PATIENCE)
    gate.set()
    assert served.post("/v1/verify/step", other).status_code == 200
    assert session.failure is None
    served.stop()


@pytest.mark.parametrize(
    ("action", "message", "status"),
    [
        ("open", {}, 400), ("open", {"vocabulary": "other", "prompt": [1]}, 409),
        ("open", {"prompt": []}, 400), ("open", {"prompt": [10**9]}, 400),
        ("open", {"prompt": [1], "temperature": -1}, 400),
        ("open", {"prompt": [1], "max_new_tokens": 10**6}, 400),
        ("step", {"sid": "x", "base_len": 1, "tokens": []}, 400), ("step", {}, 400),
        ("close", {"sid": "x"}, 400), ("none", {}, 400), ("step", [], 400),
    ],
)  # fmt: skip
def test_wrong_messages(
    verifying: Served, verifier: dllm.DiffusionModel, action: str, message: Any, status: int
) -> None:
    if isinstance(message, dict) and "prompt" in message:
        message = opening(verifier) | message
    answer = verifying.post(f"/v1/verify/{action}", message)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_a_step_that_will_not_do_leaves_the_text(
    verifying: Served, verifier: dllm.DiffusionModel
) -> None:
    opened = verifying.post("/v1/verify/open", opening(verifier)).json()
    step = {"sid": opened["sid"], "base_len": 3, "tokens": [3]}
    for wrong in ({"base_len": 7}, {"tokens": [10**9]}, {"tokens": "x"}, {"parents": [5]}):
        assert verifying.post("/v1/verify/step", {**step, **wrong}).status_code == 400
    reply = verifying.post("/v1/verify/step", step).json()
    assert reply["base_len"] == 3 + len(reply["tokens"])
    verifying.post("/v1/verify/close", {"sid": opened["sid"]})


def test_one_client_does_not_take_the_texts_of_another(
    verifier: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has most texts gives one up, the one that was silent longest."""
    monkeypatch.setattr("dllm.serve.verify.MOST_TEXTS", 8)
    asked = DeviceBody(**opening(verifier))

    async def work(session: dllm.Session) -> None:
        routes = VerifyRoutes(session, Reader(1 << 20, 100))
        few = [routes._open(asked, "b")["sid"] for _ in range(3)]
        many = [routes._open(asked, "a")["sid"] for _ in range(300)]
        assert list(routes.texts) == [*few, *many[-5:]]
        routes._open(asked, "b")
        assert list(routes.texts)[:7] == [*few, *many[-4:]]
        reply = await routes._step(DraftBody(sid=few[0], base_len=3, tokens=[3]))
        assert reply["base_len"] == 3 + len(reply["tokens"])

    with dllm.Session(verifier, max_batch_size=1) as session:
        asyncio.run(work(session))
    assert session.failure is None
