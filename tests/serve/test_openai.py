"""The real OpenAI client, and payloads as other clients send them."""

import copy
import json
from typing import Any

import pytest
import torch

import dllm
from dllm.serve.service import digest

from .conftest import Served, Start, block_model, sse

pytestmark = pytest.mark.xdist_group("openai")  # one worker imports the client
HELLO: Any = [{"role": "user", "content": "Reverse this list: Tom, Anna, Ben"}]
HOW: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "extra_body": {"block_length": 8}}


def expected(model: dllm.DiffusionModel, prompt: Any = HELLO, **how: Any) -> dllm.Result:
    """The answer without a server."""
    arguments: dict[str, Any] = {"max_new_tokens": 24, "block_length": 8, **how}
    result: dllm.Result = dllm.generate(model, prompt, **arguments)
    return result


def error(name: str) -> type[Exception]:
    """A class of the client, which is imported where it is used: that takes a second."""
    import openai

    kind: type[Exception] = getattr(openai, name)
    return kind


def test_chat(served: Served, tiny: dllm.DiffusionModel) -> None:
    answer = served.client().chat.completions.create(messages=HELLO, **HOW)
    plain = expected(tiny)
    assert answer.choices[0].message.content == plain.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == plain.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == plain.prompt_length
    assert answer.usage.completion_tokens == len(plain.tokens)
    extra = answer.model_extra
    assert extra is not None and extra["dllm"]["forwards"] == plain.nfe
    assert extra["dllm"]["computed"] == plain.computed
    assert answer.model == "tiny" and answer.system_fingerprint.startswith("fp_")


def test_a_fingerprint_is_of_the_weights() -> None:
    """Of every one of them and its dtype, so also of an adapter's and of rounded ones."""
    network = torch.nn.Sequential(torch.nn.Linear(300, 2), torch.nn.Linear(3, 3))
    first = digest(network)
    assert digest(copy.deepcopy(network)) == first
    changed = copy.deepcopy(network)
    with torch.no_grad():
        changed[1].weight *= 1.5
    more = torch.nn.Sequential(*network, torch.nn.Linear(2, 2))
    others = [digest(changed), digest(more), digest(copy.deepcopy(network).bfloat16())]
    assert len({first, *others}) == 4


def test_answers_have_the_types_of_openais_client(served: Served) -> None:
    """The client itself does not look; those in other languages do."""
    from openai.types import Completion, Model, chat, responses

    more = {"model": "tiny", "logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 8}
    answered = served.post("/v1/chat/completions", {"messages": HELLO, **more}).json()
    chat.ChatCompletion.model_validate(answered, strict=True)
    for chunk in sse(
        served.post("/v1/chat/completions", {"messages": HELLO, "stream": True, **more}).text
    ):
        chat.ChatCompletionChunk.model_validate(chunk, strict=True)
    text = {"prompt": "one", "logprobs": 2, "max_tokens": 8}
    Completion.model_validate(served.post("/v1/completions", text).json(), strict=True)
    said = {"input": "one", "max_output_tokens": 8, "top_logprobs": 2}
    responses.Response.model_validate(served.post("/v1/responses", said).json())
    Model.model_validate(served.get("/v1/models/tiny").json(), strict=True)


def test_a_stream_is_the_same_text(served: Served, tiny: dllm.DiffusionModel) -> None:
    chunks = list(
        served.client().chat.completions.create(
            messages=HELLO, stream=True, stream_options={"include_usage": True}, **HOW
        )
    )
    with_choices = [chunk for chunk in chunks if chunk.choices]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in with_choices)
    plain = expected(tiny)
    assert text == plain.text
    roles = [chunk.choices[0].delta.role for chunk in with_choices]
    assert roles[0] == "assistant" and not any(roles[1:])
    reasons = [chunk.choices[0].finish_reason for chunk in with_choices]
    assert reasons[-1] == plain.finish_reason and not any(reasons[:-1])
    assert chunks[-1].usage is not None and not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens == len(plain.tokens)
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_helper_with_drafts(served: Served, tiny: dllm.DiffusionModel) -> None:
    frames: list[Any] = []
    options: Any = {"include_drafts": "text", "include_usage": True}
    with served.client().chat.completions.stream(
        messages=HELLO, stream_options=options, **HOW
    ) as stream:
        for event in stream:
            if event.type == "chunk":
                frames.append((event.chunk.model_extra or {}).get("dllm"))
        final = stream.current_completion_snapshot  # the final one must not end by length
    plain = expected(tiny)
    assert final.choices[0].message.content == plain.text
    steps = [frame for frame in frames if frame and frame.get("type") == "step"]
    opening = next(frame for frame in frames if frame and frame.get("type") == "canvas")
    assert opening["length"] == 24
    canvas: dict[int, str] = {}
    for step in steps:
        canvas |= {at: text for at, text, _ in step["commit"]}
        for at in step["remask"]:
            del canvas[at]
    pieces = "".join(canvas[i] for i in range(len(plain.tokens)))
    tokenizer: Any = tiny.tokenizer
    whole = tokenizer.decode(plain.tokens)
    # The tiny model writes bytes that are no characters: alone they look different.
    assert pieces.replace("\ufffd", "").strip() == whole.replace("\ufffd", "").strip()
    assert steps[-1]["text"] == plain.text and steps[-1]["forwards"] == plain.nfe


def test_suffix_is_filled_in(served: Served, tiny: dllm.DiffusionModel) -> None:
    from dllm.request.prompts import encode, encode_continuation

    prompt, suffix = "Tom has", " apples."
    ids = [*encode(tiny, prompt, chat=False).tolist(), *[-1] * 6,
           *encode_continuation(tiny.tokenizer, suffix)]  # fmt: skip
    plain = dllm.infill(tiny, ids)
    how: dict[str, Any] = {"model": "tiny", "prompt": prompt, "suffix": suffix, "max_tokens": 6}
    answer = served.client().completions.create(**how)
    chunks = served.client().completions.create(**how, stream=True)
    text = answer.choices[0].text
    assert prompt + text + suffix == plain.text and text
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    how["prompt"] = ["one", prompt, "Anna, Ben and"]  # each ends elsewhere
    texts = [""] * 3
    for chunk in served.client().completions.create(**how, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    whole = served.client().completions.create(**how)
    assert texts == [choice.text for choice in whole.choices] and texts[1] == text


def test_a_stop_string_ends_the_middle_before_a_suffix(served: Served) -> None:
    body = {"prompt": "Tom has\n", "suffix": " apples.", "max_tokens": 12, "logprobs": 0}
    plain = served.post("/v1/completions", body).json()
    middle = plain["choices"][0]["text"]
    for stop in (middle[3], middle[5:8], "apples", "\n\n", "~~"):
        want = middle.partition(stop)[0]
        cut = served.post("/v1/completions", body | {"stop": [stop]}).json()
        (choice,) = cut["choices"]
        assert choice["text"] == want == "".join(choice["logprobs"]["tokens"])
        assert cut["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        assert cut["usage"]["completion_tokens"] <= 12 and choice["finish_reason"] == "stop"
        told = served.post("/v1/completions", body | {"stop": stop, "stream": True}).text
        assert "".join(chunk["choices"][0]["text"] for chunk in sse(told)) == want


def test_log_probabilities(
    served: Served, tiny: dllm.DiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, said = expected(tiny), list[Any]()
    call = type(tiny.tokenizer).__call__

    def noted(self: Any, *given: Any, **how: Any) -> Any:
        said.append(how.get("split_special_tokens"))
        return call(self, *given, **how)

    monkeypatch.setattr(type(tiny.tokenizer), "__call__", noted)
    answer = served.client().chat.completions.create(
        messages=HELLO, logprobs=True, top_logprobs=3, **HOW
    )
    assert said and None not in said, "what a tokenizer keeps as its state is said with each call"
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None and len(content) == len(plain.tokens)
    assert [t.logprob for t in content] == pytest.approx(plain.logprobs.tolist(), abs=1e-5)
    for token in content:
        assert len(token.top_logprobs) == 3
        assert any((t.token, t.bytes) == (token.token, token.bytes) for t in token.top_logprobs)
        assert max(t.logprob for t in token.top_logprobs) == pytest.approx(token.logprob, abs=1e-3)
    chunks = list(
        served.client().chat.completions.create(messages=HELLO, logprobs=True, stream=True, **HOW)
    )
    streamed = chunks[-1].choices[0].logprobs
    assert streamed is not None and streamed.content is not None
    assert [t.logprob for t in streamed.content] == [t.logprob for t in content]
    legacy = served.client().completions.create(prompt="one", logprobs=2, **HOW)
    shape = legacy.choices[0].logprobs
    assert shape is not None and shape.tokens is not None and shape.top_logprobs is not None
    assert len(shape.tokens) == len(shape.token_logprobs or []) == len(shape.top_logprobs)


def test_biases_and_filters_of_the_proposals(served: Served, tiny: dllm.DiffusionModel) -> None:
    wanted = tiny.facts.vocab_size - 1
    body = {"prompt": "one", "max_tokens": 8, "return_token_ids": True}
    (only,) = served.post("/v1/completions", body | {"logit_bias": {str(wanted): 100}}).json()[
        "choices"
    ]
    assert only["token_ids"] == [wanted] * 8
    drawn = {"temperature": 1.5, "seed": 3, "min_p": 1.0}  # leaves the best
    greedy, best = (served.post("/v1/completions", body | how).json() for how in ({}, drawn))
    assert greedy["choices"][0]["token_ids"] == best["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("how", "kind", "param"),
    [
        ({"model": "gpt-4o"}, "NotFoundError", "model"),
        ({"temperature": -1}, "BadRequestError", "temperature"),
        ({"frequency_penalty": 1}, "BadRequestError", "frequency_penalty"),
        ({"logit_bias": {"999999": 1}}, "BadRequestError", None),
        ({"max_tokens": 4000}, "BadRequestError", None),
        ({"extra_body": {"sampler": "thresold"}}, "BadRequestError", None),
        ({"extra_body": {"cache": "prefix"}}, "BadRequestError", "cache"),
        ({"extra_body": {"cache": ""}}, "BadRequestError", "cache"),
        ({"extra_body": {"bogus": 1}}, "BadRequestError", "bogus"),
    ],
)
def test_errors_by_class(served: Served, how: Any, kind: str, param: str | None) -> None:
    for stream in (False, True):
        with pytest.raises(error(kind)) as caught:
            served.client().chat.completions.create(
                messages=HELLO, stream=stream, **{"model": "tiny", **how}
            )
        raised: Any = caught.value
        assert raised.param == param
        assert raised.body["message"] and raised.body["type"]


def test_the_api_key(start: Start, tiny: dllm.DiffusionModel) -> None:
    served = start(tiny, api_key="sesame")
    with pytest.raises(error("AuthenticationError")):
        served.client().models.list()
    models, name = served.client("sesame").models, served.service.name
    assert [model.id for model in models.list()] == [name] == [models.retrieve(name).id]
    with pytest.raises(error("NotFoundError")):
        models.retrieve("other")
    assert served.get("/health").status_code == served.get("/metrics").status_code == 200


def test_payloads_of_vllms_bench(served: Served) -> None:
    """As ``vllm bench serve`` sends them, with ``--backend openai-chat`` and without."""
    how = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True},
           "temperature": 0.0, "ignore_eos": True}  # fmt: skip
    said = [{"role": "user", "content": [{"type": "text", "text": "one two"}]}]
    chunks = sse(served.post("/v1/chat/completions", {
        **how, "messages": said, "max_completion_tokens": 16,
    }).text)  # fmt: skip
    assert chunks[-1]["usage"]["completion_tokens"] == 16
    assert chunks[0]["choices"][0]["delta"]["content"] != ""
    chunks = sse(served.post("/v1/completions", {
        **how, "prompt": "one two", "max_tokens": 16, "repetition_penalty": 1.0, "logprobs": None,
    }).text)  # fmt: skip
    count = chunks[-1]["usage"]["prompt_tokens"]
    assert chunks[-1]["usage"] == {
        "prompt_tokens": count, "completion_tokens": 16, "total_tokens": count + 16,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert all("choices" in chunk for chunk in chunks)


def test_usage_with_every_chunk(served: Served) -> None:
    """vLLM's ``continuous_usage_stats``, as guidellm asks for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "block_length": 8,
            "ignore_eos": True, "n": 2, "stream": True, "stream_options": options}  # fmt: skip
    *chunks, last = sse(served.post("/v1/chat/completions", body).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 48
    assert last["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
    assert chunks[-1]["usage"] == last["usage"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    hole = {"prompt": "Tom has", "suffix": " apples.", "max_tokens": 6, "stream": True}
    *chunks, last = sse(served.post("/v1/completions", hole | {"stream_options": options}).text)
    last["usage"].pop("prompt_tokens_details")
    assert chunks[-1]["usage"] == last["usage"] and last["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"]["completion_tokens"] <= 6 for chunk in chunks)
    draft = body | {"n": 1, "initial_text": "one two [[10]] three"}
    counts = [
        c["usage"]["completion_tokens"]
        for c in sse(served.post("/v1/chat/completions", draft).text)
    ]
    assert counts == sorted(counts) and counts[-1] == 10  # what the draft says is not written
    without = sse(served.post("/v1/completions", hole).text)
    assert all("usage" not in chunk for chunk in without)


def test_infill_and_score(served: Served, tiny: dllm.DiffusionModel) -> None:
    body = {"text": "Tom, [[1]], Ben, [[2]].", "prompt": "one"}
    answer = served.post("/v1/infill", body).json()
    plain = dllm.infill(tiny, body["text"], prompt="one")
    choice = answer["choices"][0]
    assert choice["text"] == plain.text and len(choice["holes"]) == 2
    assert answer["usage"]["completion_tokens"] == 3
    pieces = body["text"].replace("[[1]]", "\0").replace("[[2]]", "\0").split("\0")
    rebuilt = pieces[0] + choice["holes"][0] + pieces[1] + choice["holes"][1] + pieces[2]
    assert rebuilt.replace(" ", "") == plain.text.replace(" ", "")
    request = {"prompt": "one", "continuation": ["two", "three"], "samples": 8, "seed": 3}
    scores = served.post("/v1/score", request).json()["data"]
    wanted = dllm.score(tiny, "one", ["two", "three"], samples=8, seed=3)
    assert [s["logprob"] for s in scores] == [s.logprob for s in wanted]
    once = served.post("/v1/score", {**request, "samples": 1})  # one forward has no spread
    assert [s["stderr"] for s in json.loads(once.text, parse_constant=pytest.fail)["data"]] == [
        None, None,
    ]  # fmt: skip


def test_a_second_turn_says_what_it_did_not_compute_again(start: Start) -> None:
    prompt = "Tom has 12 apples and Anna has 30 apples. How many apples do they have together?"
    answers = {}
    for keep in (0, None):
        verifier = start(dllm.load("nano-ar"), prefix_cache_tokens=keep)
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 12}
        first = verifier.post("/v1/chat/completions", body).json()
        second = verifier.post("/v1/chat/completions", body).json()
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert cached == (0 if keep == 0 else second["usage"]["prompt_tokens"] - 1)
        assert "dllm_cached_prompt_tokens_total{" in verifier.get("/metrics").text
        assert second["dllm"]["computed"] == first["dllm"]["computed"] - cached
        answers[keep] = [a["choices"][0]["message"]["content"] for a in (first, second)]
    assert answers[0] == answers[None] and len(set(answers[0])) == 1


def test_a_second_turn_of_a_block_model(start: Start) -> None:
    """Cache `block` keeps the first turn: the same text, from fewer positions."""
    model = block_model()
    said = {}
    for keep in (0, None):
        served = start(model, caches=("block",), prefix_cache_tokens=keep)
        turns: list[Any] = [{"role": "user", "content": "Tom has 12 apples and Anna has 30."}]
        body = {"messages": turns, "max_tokens": 12, "ignore_eos": True}
        for _ in range(2):
            answer = served.post("/v1/chat/completions", body).json()
            turns += [answer["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            said.setdefault(keep, []).append(answer["choices"][0]["message"]["content"])
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached >= 16) == (keep is None) and cached % 4 == 0
        said[keep].append(answer["dllm"]["computed"] + cached)
    assert said[0][:2] == said[None][:2] and said[None][2] <= said[0][2]
