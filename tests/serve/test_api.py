"""What clients of OpenAI's and vLLM's servers expect beside answers."""

import copy
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dllm
from dllm.request.prompts import encode
from dllm.serve.service import Service

from .conftest import Served, Start, deltas, idle, posted, raw, serve, sse, until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]
DOCS = Path(__file__).parents[2] / "docs"
ADD: Any = {
    "type": "function",
    "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}},
}
# A template as Qwen's: it shows tools and what they returned, and has a switch for thoughts.
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


@pytest.fixture(scope="module")
def talking(tiny: dllm.DiffusionModel) -> Iterator[Served]:
    """A model with that template, whose answers are what a test says: `saying`."""
    tokenizer = copy.deepcopy(tiny.tokenizer)
    assert tokenizer is not None
    tokenizer.chat_template = TEMPLATE
    served = serve(replace(tiny, tokenizer=tokenizer), name="tiny")
    yield served
    until(lambda: idle(served))
    served.stop()


def saying(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Every answer is ``text``, some characters with each step: the tiny model knows no words."""
    choice = Service.choice

    def read(self: Any, event: Any) -> Any:
        before, self.told = getattr(self, "told", 0), min(len(text), 5 + 3 * event.step)
        return replace(event, text=text[before : self.told])

    monkeypatch.setattr("dllm.runtime.events.Reader.read", read)
    monkeypatch.setattr(
        Service,
        "choice",
        lambda self, ask, result, given: choice(self, ask, replace(result, text=text), given),
    )


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'


def test_a_call_of_a_tool(talking: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and streamed, read by the openai package; the content is what is no call."""
    saying(monkeypatch, "Let me add.\n" + CALL)
    how: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 16, "tools": [ADD],
                "extra_body": {"block_length": 8}}  # fmt: skip
    answer = talking.client().chat.completions.create(**how).choices[0]
    assert answer.message.content == "Let me add." and answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    assert call.type == "function" and call.function.name == "add"
    assert json.loads(call.function.arguments) == {"a": 1, "b": "x"}
    content, calls, reasons = "", [], []
    for chunk in talking.client().chat.completions.create(stream=True, **how):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        calls += delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
    assert content == "Let me add." and reasons[-1] == "tool_calls"
    (streamed,) = calls
    assert streamed.index == 0 and streamed.id and streamed.function is not None
    assert streamed.function.name == "add"
    assert json.loads(streamed.function.arguments or "") == {"a": 1, "b": "x"}
    final = None
    with talking.client().chat.completions.stream(**how) as events:
        for _ in events:
            pass
        final = events.current_completion_snapshot
    assert final.choices[0].message.tool_calls


def test_thoughts_have_a_field_of_their_own(
    talking: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(monkeypatch, "<think>\n1 and 1\n</think>\n\nIt is 2.")
    body = {"messages": HELLO, "max_tokens": 16, "block_length": 8}
    message = talking.post(CHAT, body).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("It is 2.", "1 and 1")
    parts = deltas(talking.post(CHAT, {**body, "stream": True}))
    assert "".join(part.get("reasoning_content", "") for part in parts) == "1 and 1"
    assert "".join(part.get("content") or "" for part in parts) == "It is 2."


def test_tools_and_their_results_reach_the_template(talking: Served) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "2"}]  # fmt: skip
    body = {"messages": messages, "tools": [ADD], "max_tokens": 4, "return_token_ids": True,
            "block_length": 4, "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    ids = talking.post(CHAT, body).json()["choices"][0]["prompt_token_ids"]
    text = talking.service.spelling.decode(ids)
    assert '"arguments": {"a": 1}' in text and text.endswith("<think></think>")
    assert text.startswith("add: a sum")


def test_variables_of_a_template(talking: Served, served: Served) -> None:
    """Those that it does not read change nothing; it cannot be replaced."""
    body = {"messages": HELLO, "max_tokens": 4, "block_length": 4, "return_token_ids": True}
    plain = served.post(CHAT, body).json()["choices"][0]
    ways: list[Any] = [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"other": 1}},
        {"chat_template_kwargs": {"chat_template": "x", "padding": True}},
    ]
    for more in ways:
        assert served.post(CHAT, body | more).json()["choices"][0] == plain
    thought = talking.post(CHAT, body | {"enable_thinking": False}).json()["choices"][0]
    assert thought["prompt_token_ids"] != plain["prompt_token_ids"]
    for kwargs in ({"messages": []}, {"tokenize": True}):
        answer = talking.post(CHAT, {"messages": HELLO, "chat_template_kwargs": kwargs})
        assert answer.status_code == 400 and "no variable" in answer.text
    special = talking.service.model.tokenizer.all_special_tokens[0]  # type: ignore[union-attr]
    bad = {"type": "function", "function": {"name": "f", "description": f"a {special} b"}}
    answer = talking.post(CHAT, {"messages": HELLO, "tools": [bad]})
    assert answer.status_code == 400 and "cannot be text" in answer.text


def test_a_template_that_shows_no_tools(start: Start, tiny: dllm.DiffusionModel) -> None:
    tokenizer: Any = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    bare = start(replace(tiny, tokenizer=tokenizer))
    answer = bare.post(CHAT, {"messages": HELLO, "tools": [ADD]})
    assert answer.status_code == 400 and "shows no tools" in answer.text
    forced = {"messages": HELLO, "tools": [ADD], "tool_choice": "required", "max_tokens": 64}
    assert bare.post(CHAT, forced).json()["choices"][0]["message"]["tool_calls"]


def test_tokens_of_a_text(served: Served, tiny: dllm.DiffusionModel) -> None:
    text = served.post("/tokenize", {"prompt": "one two", "return_token_strs": True}).json()
    assert text["tokens"] == encode(tiny, "one two", False).tolist()
    assert text["count"] == len(text["tokens"]) == len(text["token_strs"])
    assert text["max_model_len"] == tiny.facts.context_length
    said = served.post("/tokenize", {"messages": HELLO}).json()
    assert said["tokens"] == encode(tiny, HELLO).tolist()
    back = served.post("/detokenize", {"tokens": text["tokens"]}).json()
    assert back == {"prompt": "one two"}
    for wrong in ([10**6], [-1], ["a"]):
        assert served.post("/detokenize", {"tokens": wrong}).status_code == 400
    assert served.post("/tokenize", {"prompt": "a", "messages": HELLO}).status_code == 400


def test_echo_repeats_the_prompt(served: Served) -> None:
    body = {"prompt": "one two", "max_tokens": 8, "block_length": 8}
    plain = served.post(TEXT, body).json()["choices"][0]["text"]
    assert served.post(TEXT, {**body, "echo": True}).json()["choices"][0]["text"] == (
        "one two" + plain
    )
    streamed = sse(served.post(TEXT, {**body, "echo": True, "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "one two" + plain
    whole = served.post(TEXT, {**body, "echo": True, "logprobs": 1}).json()["choices"][0]
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"] == "one two" + plain
    scored = served.post(TEXT, {"prompt": "a b c", "max_tokens": 0, "echo": True, "logprobs": 1})
    (choice,), used = scored.json()["choices"], scored.json()["usage"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == "a b c"
    assert used["completion_tokens"] == 0 and choice["finish_reason"] == "length"
    more = served.post(TEXT, {"prompt": "a b c", "max_tokens": 1, "echo": True, "logprobs": 1})
    likely = choice["logprobs"]["token_logprobs"]
    assert more.json()["choices"][0]["logprobs"]["token_logprobs"][: len(likely)] == likely
    assert served.post(TEXT, {"prompt": "a b c", "max_tokens": 0}).status_code == 400


def test_the_document_describes_what_is_answered(served: Served) -> None:
    document = served.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    paths = document["paths"]
    assert {CHAT, TEXT, "/v1/infill", "/tokenize", "/health", "/v1/models/{name}"} <= paths.keys()
    ref = paths[CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    chat = document["components"]["schemas"][ref.rpartition("/")[2]]
    assert chat["required"] == ["messages"]
    asked = document["components"]["schemas"]["ResponseBody"]["properties"]["input"]
    assert [one["type"] for one in asked["anyOf"]] == ["string", "array"]
    assert chat["properties"]["n"] | {"minimum": 1, "maximum": 8} == chat["properties"]["n"]
    assert chat["properties"]["top_p"]["type"] == "number"
    assert "security" not in paths[CHAT]["post"]  # this server asks for no key

    def refs(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from ([value["$ref"]] if "$ref" in value else [])
            value = list(value.values())
        for item in value if isinstance(value, list) else ():
            yield from refs(item)

    for ref in refs(document):
        assert ref.rpartition("/")[2] in document["components"]["schemas"], ref
    for page in ("serving.md", "reference/http-api.md"):
        told = (DOCS / page).read_text().partition("## Endpoints")[2].partition("\n## ")[0]
        assert {*re.findall(r"`(?:GET |POST )?(/[\w/.]*)`", told)} <= paths.keys()


@pytest.mark.parametrize(
    ("path", "word"),
    [("/v1/embeddings", "no embeddings"), ("/api/generate", "Ollama"),
     ("/v1/responses/resp_1", "not kept"), ("/v1/responses/", "it is at /v1/responses"),
     ("//v1/models", "it is at /v1/models"),
     ("/v1/batches", "dllm batch"), ("/v1/messages", "/v1/chat/completions"),
     ("/nothing", "Not Found")],
)  # fmt: skip
def test_what_is_not_here(served: Served, path: str, word: str) -> None:
    answer = served.post(path, {})
    assert answer.status_code == 404 and word in answer.json()["error"]["message"]


def test_a_client_that_offers_http_2(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Java's, with its first request: its body counts, and it is not warned about."""
    offer = (
        b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA"
    )
    sent = posted(CHAT, {"messages": HELLO, "max_tokens": 4})
    log = logging.getLogger("uvicorn.error")
    log.addHandler(caplog.handler)
    answer = raw(served, sent.replace(b"Host: x", b"Host: x\r\n" + offer))
    log.removeHandler(caplog.handler)
    assert answer.startswith(b"HTTP/1.1 200") and "pgrade" not in caplog.text


def test_a_line_of_the_log_per_request(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dllm.access")
    body = {"messages": HELLO, "max_tokens": 8, "block_length": 8, "n": 2}
    names = [served.post(CHAT, body).json()["id"]]
    names.append(sse(served.post(CHAT, {**body, "stream": True}).text)[0]["id"])
    served.post(CHAT, {"messages": HELLO, "n": 99})
    served.get("/v1/models/a%0Db")
    parts = [{"type": "text", "text": "a secret"}, {"type": "image_url"}]
    served.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    form = {"name": "x", "schema": {"$ref": "#/a\nforged"}}
    served.post(CHAT, {"messages": HELLO, "response_format": {"type": "json_schema",
                                                             "json_schema": form}})  # fmt: skip
    lines = [record.getMessage() for record in caplog.records if record.name == "dllm.access"]
    assert len(lines) == 6 and not {*"\r\n"} & {*"".join(lines)}
    assert lines[4].endswith("text only") and "#/a forged" in lines[5]  # no value that was sent
    for name, line in zip(names, lines, strict=False):
        assert line.startswith(f"{name} 200: 2 answers, ") and "forwards" in line
        assert "queued" in line
    assert lines[2].startswith(f"POST {CHAT} 400: n must be")


@pytest.mark.parametrize("prompt", ["one two", "a character of several tokens: 😀", "", "\n    "])
def test_only_the_middle_is_told_of_before_a_suffix(served: Served, prompt: str) -> None:
    body = {"prompt": prompt, "suffix": " three", "max_tokens": 4, "return_token_ids": True}
    plain = served.post("/tokenize", {"prompt": prompt}).json()
    for more in ({"logprobs": 2}, {"logprobs": 0}, {}):
        (choice,) = served.post(TEXT, body | more).json()["choices"]
        assert len(choice["token_ids"]) == 4
        assert choice["prompt_token_ids"] == plain["tokens"]
        if more:
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            assert all(q < 0 for q in choice["logprobs"]["token_logprobs"])
            assert choice["logprobs"]["text_offset"][0] == 0
    far = served.post(TEXT, body | {"max_tokens": 2**31 - 1})
    assert far.status_code == 400 and "max_tokens=2147483647" in far.json()["error"]["message"]


def test_equal_prompts_are_drawn_apart_as_in_the_library(
    served: Served, tiny: dllm.DiffusionModel
) -> None:
    how = {"temperature": 2.0, "seed": 7, "sampler": "llada", "n": 2}
    prompts = ["one", "two", "one"]
    body = {"prompt": prompts, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    choices = served.post(TEXT, body | how).json()["choices"]
    plain = dllm.generate(tiny, prompts, chat=False, max_new_tokens=8, min_new_tokens=8, **how)
    assert [choice["token_ids"] for choice in choices] == [r.tokens for rs in plain for r in rs]
    assert choices[0]["token_ids"] != choices[4]["token_ids"]
    assert [choice["index"] for choice in choices] == [*range(6)]


def test_a_stop_string_ends_an_answer_that_ignores_stop_ids(served: Served) -> None:
    body = {"prompt": "one", "max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    (whole,) = served.post(TEXT, body).json()["choices"]
    assert len(whole["token_ids"]) == 24 and whole["finish_reason"] == "length"
    stop = whole["text"][-9:-6]
    (cut,) = served.post(TEXT, body | {"stop": stop}).json()["choices"]
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop" and len(cut["token_ids"]) < 24


def test_pieces_are_the_text_where_its_first_blank_is_dropped(
    tiny: dllm.DiffusionModel, start: Start
) -> None:
    """As tokenizers made with SentencePiece do: "▁one" is "one" at the start of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [f"▁w{i}" for i in range(tiny.facts.vocab_size - 2)]
    known = {word: i for i, word in enumerate(["<s>", "[MASK]", *words])}
    core = Tokenizer(models.WordLevel(known, unk_token="<s>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template="w1", eos_token="<s>")
    served = start(replace(tiny, tokenizer=tokenizer))
    body = {"prompt": "w1 w2", "max_tokens": 4, "ignore_eos": True}
    (choice,) = served.post(TEXT, body | {"logprobs": 2}).json()["choices"]
    told, text = choice["logprobs"], choice["text"]
    assert not text.startswith(" ") and "".join(told["tokens"]) == text
    for at, token, tops in zip(
        told["text_offset"], told["tokens"], told["top_logprobs"], strict=True
    ):
        assert text[at : at + len(token)] == token and token in tops
    # A special token before it is no text, so that the blank is dropped behind it, too.
    ended = body | {"constraints": {"0": 0, "1": 7}, "logprobs": 2}
    (choice,) = served.post(TEXT, ended).json()["choices"]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] != ""
    chat = {"messages": HELLO, "max_tokens": 4, "ignore_eos": True, "logprobs": True}
    (choice,) = served.post(CHAT, chat).json()["choices"]
    pieces = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert "".join(pieces) == choice["message"]["content"]


def test_a_request_id_with_blanks_at_its_end(served: Served) -> None:
    name = "a\tb" * 43
    answer = served.post(CHAT, {"messages": HELLO, "max_tokens": 4}, headers={"X-Request-Id": name})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == name[:127]


def test_a_read_only_step(served: Served, tiny: dllm.DiffusionModel) -> None:
    body = {"tokens": [5, -1, 7, -1], "prompt": "one", "top": 3}
    data = served.post("/v1/step", body).json()["data"]
    plain = dllm.step(tiny, [5, -1, 7, -1], prompt="one", top=3)
    assert [entry["position"] for entry in data] == [1, 3]
    for entry, tokens, logprobs in zip(data, plain.tokens, plain.logprobs, strict=True):
        assert [one["id"] for one in entry["top"]] == tokens.tolist()
        assert [one["logprob"] for one in entry["top"]] == pytest.approx(logprobs, abs=1e-5)
    assert len(served.post("/v1/step", {"text": "a [[2]]"}).json()["data"]) == 2
    for wrong in ({}, {"text": "a [[1]]", "tokens": [-1]}, {"text": "a"}, {"tokens": [-2]}):
        assert served.post("/v1/step", wrong).status_code == 400
