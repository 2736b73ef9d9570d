"""What OpenAI's and vLLM's clients send, and what they read out of answers and errors."""

import json
import logging
import math
from itertools import product
from typing import Any

import httpx
import numpy as np
import pytest

import dllm
from dllm.core.errors import ConfigError
from dllm.request.prompts import encode
from dllm.serve.settings import Settings

from ..thin import some
from .conftest import Served, Start, deltas, sse

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO: Any = [{"role": "user", "content": "Reverse this list: Tom, Anna, Ben"}]
HOW: Any = {"messages": HELLO, "max_tokens": 24, "block_length": 8}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add", "description": "adds",
        "parameters": {
            "type": "object", "required": ["a"], "additionalProperties": False, "strict": True,
            "properties": {"a": {"enum": [1, 2]}},
        },
    },
}  # fmt: skip
SURE: Any = {
    "type": "json_schema",
    "json_schema": {"name": "Sure", "schema": {
        "type": "object", "required": ["sure"], "additionalProperties": False,
        "properties": {"sure": {"$ref": "#/$defs/Sure"}}, "$defs": {"Sure": {"type": "boolean"}},
    }},
}  # fmt: skip


@pytest.fixture(scope="module")
def nano(request: pytest.FixtureRequest) -> Any:
    from .conftest import idle, serve, until

    result = serve(dllm.load("nano"), name="nano")
    yield result
    until(lambda: idle(result))
    result.stop()


def first(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


# -- tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "choice"), some(product(
    [{"stop": ["Observation:"]}, {"response_format": SURE}, {}],
    ["required", {"type": "function", "function": {"name": "add"}}],
), 1))  # fmt: skip
def test_a_call_beside_stop_strings_and_forms(nano: Served, choice: Any, more: Any) -> None:
    body = {**HOW, "max_tokens": 64, "tools": [ADD], "tool_choice": choice, **more}
    (call,) = first(nano.post(CHAT, body))["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, 2)
    parts = deltas(nano.post(CHAT, body | {"stream": True}))
    streamed = [one["function"] for part in parts for one in part.get("tool_calls", ())]
    assert streamed[0]["name"] == call["function"]["name"]
    assert "".join(one.get("arguments", "") for one in streamed) == call["function"]["arguments"]


@pytest.mark.slow
def test_a_call_or_an_instance(nano: Served) -> None:
    """Whatever the model prefers, and streams bring the same."""
    called: list[int] = []  # deltas of each call
    for seed in range(3):
        body = {**HOW, "max_tokens": 64, "tools": [ADD], "response_format": SURE,
                "temperature": 2.0, "seed": seed}  # fmt: skip
        whole = first(nano.post(CHAT, body))["message"]
        parts = deltas(nano.post(CHAT, body | {"stream": True}))
        assert "".join(part.get("content") or "" for part in parts) == (whole["content"] or "")
        if whole.get("tool_calls"):
            (call,) = whole["tool_calls"]
            streamed = [one["function"] for part in parts for one in part.get("tool_calls", ())]
            arguments = [one.get("arguments", "") for one in streamed]
            assert call["function"]["name"] == streamed[0]["name"] == "add"
            assert "".join(arguments) == call["function"]["arguments"]
            called += [len(arguments)]
        else:
            assert set(json.loads(whole["content"])) == {"sure"}
    assert not called or max(called) > 1  # arguments come before the call is whole


def test_the_bundled_model_reads_tools_and_their_results(nano: Served) -> None:
    tokenizer = nano.service.model.tokenizer
    assert nano.service.model.facts.context_length == 2048 and tokenizer is not None
    plain = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert plain == f"<|user|>{HELLO[0]['content']}<|assistant|>"
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call, call]},
             {"role": "tool", "tool_call_id": "c", "content": "35"}]  # fmt: skip
    answer = nano.post(CHAT, {"messages": turns, "tools": [ADD], "return_token_ids": True,
                              "max_tokens": 8})  # fmt: skip
    said = tokenizer.decode(first(answer)["prompt_token_ids"])
    assert '"name": "add"' in said and said.count("<tool_call>") == 3
    assert "<tool_response>35</tool_response>" in said


# -- log-probabilities ---------------------------------------------------------------------------


def test_tokens_joined_are_the_text(nano: Served) -> None:
    """No end of the text among them, and nothing behind a stop string."""
    for more in ({}, {"stop": "Anna"}, {"stop": " An"}):
        choice = first(nano.post(CHAT, {**HOW, "logprobs": True, **more}))
        tokens = choice["logprobs"]["content"]
        assert "".join(one["token"] for one in tokens) == choice["message"]["content"]
        spelled = bytes(byte for one in tokens for byte in one["bytes"])
        assert spelled.decode() == choice["message"]["content"]
        assert choice["finish_reason"] == "stop"


def test_log_probabilities_of_the_own_token(nano: Served) -> None:
    body = {"prompt": "Tom, Anna", "max_tokens": 4}
    for count in (0, 2):
        shape = first(nano.post(TEXT, body | {"logprobs": count}))["logprobs"]
        for token, own, top in zip(
            shape["tokens"], shape["token_logprobs"], shape["top_logprobs"], strict=True
        ):
            assert top[token] == own and len(top) in ({1} if not count else {2, 3})


def test_tokens_by_their_ids(nano: Served) -> None:
    body = {"prompt": "Tom, Anna", "max_tokens": 4, "logprobs": 1, "return_token_ids": True,
            "return_tokens_as_token_ids": True}  # fmt: skip
    choice = first(nano.post(TEXT, body))
    stops = nano.service.model.facts.stop_token_ids
    ids = [f"token_id:{token}" for token in choice["token_ids"] if token not in stops]
    assert choice["logprobs"]["tokens"] == ids
    assert nano.post(TEXT, body).json()["prompt_token_ids"] == choice["prompt_token_ids"]


def test_log_probabilities_of_tokens_that_are_named(nano: Served) -> None:
    size = nano.service.model.facts.vocab_size
    wanted = [7, size - 1]
    body = {"messages": HELLO, "max_tokens": 4, "logprobs": True, "logprob_token_ids": wanted,
            "return_tokens_as_token_ids": True}  # fmt: skip
    for one in first(nano.post(CHAT, body))["logprobs"]["content"]:
        assert {top["token"] for top in one["top_logprobs"]} == {f"token_id:{i}" for i in wanted}
    for more, word in (({"max_tokens": 2000}, "fewer tokens"), ({"logprobs": False}, "needs"),
                       ({"logprob_token_ids": [size]}, f"token id {size} is outside")):  # fmt: skip
        assert word in nano.post(CHAT, body | more).json()["error"]["message"]


@pytest.mark.parametrize("name", ["nano", "nano-ar"])
def test_likelihoods_of_a_prompt(start: Start, name: str) -> None:
    """``echo`` with ``logprobs``, as lm-eval asks: any part of the prompt has the score that
    `dllm.score` gives it in reading order."""
    model = dllm.load(name)
    served = start(model)
    text = "Reverse this list: Tom, Anna, Ben"
    ids = encode(model, text, False)
    body = {"prompt": [ids.tolist()], "max_tokens": 1, "echo": True, "logprobs": 1}
    if name == "nano-ar":  # it has no alternatives beside the tokens that it writes
        assert served.post(TEXT, body).status_code == 400
        body = {"prompt": text, "max_tokens": 1, "prompt_logprobs": 1}
        given = first(served.post(TEXT, body))["prompt_logprobs"]
        own = [None if one is None else one[str(i)]["logprob"]
               for i, one in zip(ids, given, strict=True)]  # fmt: skip
        how = {}
    else:
        shape = first(served.post(TEXT, body))["logprobs"]
        own, how = shape["token_logprobs"][: len(ids)], {"estimator": "left_to_right"}
        assert "".join(shape["tokens"][: len(ids)]) == text
        best = [max(top, key=lambda one: top[one]) for top in shape["top_logprobs"][1:]]
        assert len(best) == len(ids)
        given = first(served.post(TEXT, {"prompt": text, "max_tokens": 1, "prompt_logprobs": 2}))
        same = given["prompt_logprobs"]
        assert [one and one[str(i)]["logprob"] for i, one in zip(ids, same, strict=True)] == own
        chat = served.post(CHAT, HOW | {"prompt_logprobs": 0}).json()
        assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) > 3
        streamed = sse(served.post(CHAT, HOW | {"prompt_logprobs": 0, "stream": True}).text)[-1]
        assert streamed["choices"][0]["prompt_logprobs"] == chat["prompt_logprobs"]
    assert own[0] is None
    for cut in (1, 4):
        score = dllm.score(model, ids[:cut].tolist(), ids[cut:].tolist(), **how)
        assert math.isclose(sum(own[cut:]), score.logprob, abs_tol=1e-4)


def test_log_probabilities_of_a_response(nano: Served) -> None:
    for more in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        body = {"input": "Reverse this list: Tom, Anna", "max_output_tokens": 16, **more}
        (item,) = nano.post(RESPONSES, body).json()["output"]
        (part,) = item["content"]
        assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
        assert all(len(one["top_logprobs"]) == body.get("top_logprobs", 0)
                   for one in part["logprobs"])  # fmt: skip
        assert item["id"].startswith("msg_")


# -- prompts that are too long -------------------------------------------------------------------


def test_what_clients_look_for_where_a_prompt_is_too_long(served: Served) -> None:
    nine = {"regex": "(one two three ){9}"}
    for body in ({**HOW, "max_tokens": 4000}, {"prompt": [5] * 200}, {"prompt": "one " * 150},
                 {"prompt": "one " * 1500},
                 {"prompt": [5] * 120, "structured_outputs": nine}):  # fmt: skip
        error = served.post(CHAT if "messages" in body else TEXT, body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        told = error["message"].lower()
        assert "this model's maximum context length is 128 tokens" in told
        assert "prompt is too long" in told and "max_new_tokens" not in told


def test_prompts_that_are_cut(served: Served) -> None:
    ids = [5 + i % 7 for i in range(300)]
    body = {"prompt": ids[:100], "max_tokens": 4, "return_token_ids": True, "block_length": 4}
    for most, kept in ((10, 10), (-1, 100)):
        cut = first(served.post(TEXT, body | {"truncate_prompt_tokens": most}))
        assert cut["prompt_token_ids"] == ids[:100][-kept:]
    turns = [{"role": role, "content": f"{i} one two three four five six seven"}
             for i in range(12) for role in ("user", "assistant")]  # fmt: skip
    body = {"input": [*turns, *HELLO], "instructions": "two", "max_output_tokens": 8}
    assert served.post(RESPONSES, body).status_code == 400
    answer = served.post(RESPONSES, body | {"truncation": "auto"}).json()
    assert answer["status"] in ("completed", "incomplete") and answer["truncation"] == "auto"
    assert answer["usage"]["input_tokens"] <= 120


# -- what stands around answers ------------------------------------------------------------------


def test_web_pages_may_ask(start: Start, tiny: dllm.DiffusionModel) -> None:
    def asked(served: Served, origin: str) -> httpx.Response:
        return served.ask("OPTIONS", CHAT, headers={
            "Origin": origin, "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
            "Access-Control-Request-Private-Network": "true",
        })  # fmt: skip

    plain = start(tiny, api_key="sesame")
    for origin in ("http://localhost:3000", "http://127.0.0.1:8080", "https://[::1]"):
        assert asked(plain, origin).headers["access-control-allow-origin"] == origin
    for origin in ("https://example.com", "http://localhost.example.com", "null"):
        assert "access-control-allow-origin" not in asked(plain, origin).headers
    refused = plain.post(CHAT, HOW, headers={"Origin": "http://localhost:3000"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://localhost:3000"
    named = start(tiny, cors=("https://example.com",))
    allowed = asked(named, "https://example.com")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-origin" not in asked(named, "https://example.org").headers
    assert asked(start(tiny, cors=("*",)), "https://example.org").status_code == 200
    for wrong in ("example.org", "https://example.org/", "https://example.org/page"):
        with pytest.raises(ConfigError, match="is no origin"):
            Settings(cors=(wrong,))


def test_keys(start: Start, tiny: dllm.DiffusionModel) -> None:
    served = start(tiny, api_key="one,two")
    for headers, status in (
        ({"authorization": "Bearer one"}, 200), ({"x-api-key": "two"}, 200),
        ({"x-api-key": "one,two"}, 401), ({"authorization": "Basic one"}, 401), ({}, 401),
        ({"authorization": "Bearer"}, 401),
    ):  # fmt: skip
        for path in ("/v1/models", "/openapi.json"):
            assert served.get(path, headers=headers).status_code == status
    told = served.get("/openapi.json", headers={"x-api-key": "one"}).json()["paths"]
    assert "security" in told["/v1/models"]["get"] and "security" not in told["/health"]["get"]
    assert served.get("/ping").status_code == 200
    assert served.get("/favicon.ico").headers["content-type"].startswith("image/svg")
    assert served.post("/v1/completions/", {}).status_code in (401, 404)  # and no 307


def test_a_hint_at_the_base_url(served: Served) -> None:
    for path in ("/chat/completions", "/v1/v1/chat/completions", "/v1/completions/"):
        error = served.post(path, HOW).json()["error"]
        assert "base URL" in error["message"] and "/v1/" in error["message"]
    assert "base URL" not in served.post("/nothing", HOW).text


def test_names_of_requests(served: Served) -> None:
    assert served.post(CHAT, HOW, headers={"x-request-id": "a"}).headers["x-request-id"] == "a"
    for body in (HOW, {}, HOW | {"stream": True}):
        assert served.post(CHAT, body).headers["x-request-id"].startswith("req_")
    assert served.get("/nothing").headers["x-request-id"].startswith("req_")


def test_what_is_told_of_the_tokenizer(served: Served, tiny: dllm.DiffusionModel) -> None:
    told = served.get("/tokenizer_info").json()
    assert told["eos_token"] == tiny.tokenizer.eos_token  # type: ignore[union-attr]
    assert told["chat_template"] and told["tokenizer_class"]
    turns = [*HELLO, {"role": "assistant", "content": "Ben"}]

    def tokens(**body: Any) -> list[int]:
        answer: list[int] = served.post("/tokenize", body).json()["tokens"]
        return answer

    ready, open_ = tokens(messages=HELLO), tokens(messages=HELLO, add_generation_prompt=False)
    assert ready[: len(open_)] == open_ and len(ready) > len(open_)
    whole = tokens(messages=turns, add_generation_prompt=False)
    going = tokens(messages=turns, continue_final_message=True, add_generation_prompt=False)
    assert whole[: len(going)] == going and len(whole) == len(going) + 1
    assert tokens(prompt="one", add_special_tokens=False) == tokens(prompt="one")
    counted = served.post("/v1/responses/input_tokens", {"input": HELLO[0]["content"]}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": len(ready)}
    (card,) = served.get("/v1/models").json()["data"]
    assert card["root"] == tiny.name and card["id"] == "tiny"


def test_what_a_response_says_of_itself(nano: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dllm.access")
    tools = [{"type": "function", **ADD["function"], "defer_loading": False}]
    body = {"input": "one", "store": True, "max_tool_calls": 1, "tools": tools,
            "tool_choice": {"type": "allowed_tools", "mode": "required",
                            "tools": [{"type": "function", "name": "add"}]},
            "max_output_tokens": 64}  # fmt: skip
    answer = nano.post(RESPONSES, body).json()
    assert answer["store"] is False and answer["max_tool_calls"] == 1
    assert answer["tools"][0]["strict"] is None  # OpenAI's schema has it always
    assert answer["instructions"] is None  # as OpenAI says where there are none
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    wrong = nano.post(RESPONSES, {"input": "one", "max_output_tokens": 9, "min_tokens": 10})
    assert "max_output_tokens" in wrong.json()["error"]["message"]
    assert "max_output_tokens" in caplog.messages[-1]
    wrong = nano.post(RESPONSES, body | {"min_tokens": 9})
    assert wrong.json()["error"]["message"].startswith("min_tokens does not go with a structure")
    wrong = nano.post(RESPONSES, {"input": "one", "max_tokens": 9})
    assert wrong.json()["error"]["message"].startswith("max_tokens=9 is not supported: here it is")


def test_a_seed_of_minus_one_draws_one(served: Served) -> None:
    body = {**HOW, "temperature": 1.0, "seed": -1}
    seeds = {served.post(CHAT, body).json()["dllm"]["seed"] for _ in range(3)}
    assert len(seeds) == 3 and all(np.asarray([*seeds]) >= 0)
