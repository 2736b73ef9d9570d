"""Calls of tools and thoughts: what is read out of a text, whole or in pieces."""

import json
import random
from typing import Any

import pytest

from dllm.serve.tools import SYNTAXES, Forced, Parser, calls_in, shows_tools, syntax_of, thinks
from dllm.structured.compiling import byte_automaton

NAMES = ("add", "now")


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def read(parser: Parser, text: str, seed: int | None = None) -> tuple[str, str, list[Any]]:
    """What a parser says of ``text``, fed in random pieces; nothing it says is taken back."""
    rng, at, before = random.Random(seed), 0, ("", "", 0)
    while at < len(text):
        step = len(text) if seed is None else rng.randint(1, 7)
        parser.feed(text[at : at + step])
        at += step
        said = parser.said
        assert said.content.startswith(before[0]) and said.reasoning.startswith(before[1])
        assert len(said.calls) >= before[2]
        before = said.content, said.reasoning, len(said.calls)
    parser.end()
    said = parser.said
    assert said.content.startswith(before[0]) and said.reasoning.startswith(before[1])
    return said.content, said.reasoning, [(c.name, json.loads(c.arguments)) for c in said.calls]


HERMES = [
    ("Hello.", "Hello.", "", []),
    (call("add", a=1, b=2), "", "", [("add", {"a": 1, "b": 2})]),
    ("Let me see.\n" + call("add", a=1) + "\n" + call("now"), "Let me see.", "",
     [("add", {"a": 1}), ("now", {})]),
    ("<think>\n1 + 1?\n</think>\n\nIt is 2.", "It is 2.", "1 + 1?", []),
    ("<think>a</think>" + call("now"), "", "a", [("now", {})]),
    (call("other", a=1), call("other", a=1), "", []),
    ("<tool_call>{broken</tool_call> end", "<tool_call>{broken</tool_call> end", "", []),
    ('<tool_call>{"name": "now", "arguments": {}}', "", "", [("now", {})]),
    ("<tool_call>never closed", "<tool_call>never closed", "", []),
    ("a < b and <tool", "a < b and <tool", "", []),
    ("two  blanks  \n at the end \n", "two  blanks  \n at the end \n", "", []),
    ("</think> alone", "</think> alone", "", []),
]  # fmt: skip


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), HERMES)
def test_tags(text: str, content: str, reasoning: str, calls: Any, seed: int | None) -> None:
    parser = SYNTAXES["hermes"].parser(NAMES, 8, thinks=True)
    assert read(parser, text, seed) == (content, reasoning, calls)


@pytest.mark.parametrize("seed", [None, 3])
def test_thoughts_that_the_prompt_has_opened(seed: int | None) -> None:
    parser = SYNTAXES["hermes"].parser((), 8, thinks=True, thinking=True)
    assert read(parser, "so it is\n</think>\nYes. <tool_call>", seed) == (
        "Yes. <tool_call>", "so it is", []
    )  # fmt: skip
    unfinished = SYNTAXES["hermes"].parser((), 8, thinks=True, thinking=True)
    assert read(unfinished, "so it", seed) == ("", "so it", [])


LLAMA = [
    ("Hello.", "Hello.", []),
    ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    ('{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}', "",
     [("add", {"a": 1}), ("now", {})]),
    ('[{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}]', "",
     [("add", {"a": 1}), ("now", {})]),
    ("[1] is a list", "[1] is a list", []),
    ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    ('{"a": 1} is JSON', '{"a": 1} is JSON', []),
]  # fmt: skip


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("text", "content", "calls"), LLAMA)
def test_json_without_tags(text: str, content: str, calls: Any, seed: int | None) -> None:
    assert read(SYNTAXES["llama"].parser(NAMES, 8), text, seed) == (content, "", calls)
    thinking = SYNTAXES["llama"].parser(NAMES, 8, thinks=True)
    assert read(thinking, f"<think>so</think>\n{text}", seed) == (content, "so", calls)
    thinking = SYNTAXES["llama"].parser((), 8, thinks=True, thinking=True)
    assert read(thinking, f"so</think>{text}", seed) == (text, "so", [])


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("text", "content", "calls"), [
    ('{"name": "add", "arguments": {"a": "}\\"]{", "b": [{}]}}', "",
     [("add", {"a": "}\"]{", "b": [{}]})]),
    ('[{"name":"add","parameters":{"a":1}}, {"name": "now", "parameters": {}}]', "",
     [("add", {"a": 1}), ("now", {})]),
    ('{"name": "now", "arguments": 7}', "", [("now", 7)]),
    ('{"name": "no', '{"name": "no', []),  # cut off
])  # fmt: skip
def test_calls_that_a_schema_wrote(text: str, content: str, calls: Any, seed: int | None) -> None:
    assert read(Forced(NAMES, 8), text, seed) == (content, "", calls)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("text", "content", "calls"), [
    ('{"name": "add", "arguments": {"a": 1}}', "", [("add", {"a": 1})]),
    ('[{"name": "add", "arguments": {}}, {"name": "now", "arguments": {}}]', "",
     [("add", {}), ("now", {})]),
    ('{"name": "Ann", "arguments": []}', '{"name": "Ann", "arguments": []}', []),
    ('[{"name": "add", "arguments": {}}, 7]', '[{"name": "add", "arguments": {}}, 7]', []),
    ('{"names": ["add"]}', '{"names": ["add"]}', []), ('"add"', '"add"', []), ("7", "7", []),
])  # fmt: skip
def test_a_call_or_an_instance(text: str, content: str, calls: Any, seed: int | None) -> None:
    assert read(Forced(NAMES, 8, either=True), text, seed) == (content, "", calls)


def test_what_is_no_call_is_said_as_it_comes() -> None:
    parser, shown = Forced(NAMES, 8, either=True), list[str]()
    for character in (text := '{"na": "b", "c": 1}'):
        parser.feed(character)
        shown.append(parser.said.content)
    assert shown == ["" if n < 5 else text[:n] for n in range(1, len(text) + 1)]


@pytest.mark.parametrize("either", [False, True])
def test_arguments_are_there_as_they_come(either: bool) -> None:
    arguments = '{"a": "x\\\\", "b": 2}'
    parser, shown = Forced(NAMES, 8, either), list[str]()
    for character in f'{{"name": "add", "arguments": {arguments}}}':
        parser.feed(character)
        shown += [call.arguments for call in parser.said.calls]
    half = arguments.index("\\") + 1  # of an escape
    wanted = [arguments[:n] for n in range(1, len(arguments) + 1) if n != half]
    assert [*dict.fromkeys(shown)] == wanted
    one = Forced(NAMES, 1)
    assert read(one, '[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]')[2] == [
        ("now", {})
    ]


def test_one_call_where_there_may_be_one() -> None:
    parser = SYNTAXES["hermes"].parser(NAMES, 1)
    assert read(parser, call("now") + call("add", a=1))[2] == [("now", {})]


def test_arguments_that_are_a_string_stay_one() -> None:
    (one,) = calls_in('{"name": "add", "arguments": "{\\"a\\": 1}"}', NAMES)
    assert one.arguments == '{"a": 1}' and one.body()["function"]["name"] == "add"
    assert calls_in("[" * 100_000, NAMES) == [] and calls_in("", NAMES) == []


def test_references_within_the_arguments_of_tools() -> None:
    """Both tools call a part of theirs "Part", as schemas made from classes do."""

    def tool(name: str, part: dict[str, Any]) -> dict[str, Any]:
        inner = {"type": "array", "items": {"$ref": "#/$defs/Part"}, "minItems": 1, "maxItems": 1}
        return {"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {"parts": inner}, "required": ["parts"],
            "$defs": {"Part": part},
        }}}  # fmt: skip

    tools = [tool("add", {"type": "integer"}), tool("now", {"const": "x"})]
    tools[0]["function"]["parameters"]["$id"] = "https://example.com/add"
    for several in (False, True):
        schema = SYNTAXES["hermes"].schema(tools, "required", several)
        automaton, _ = byte_automaton({"json_schema": schema})
        for name, value, fits in (("add", 7, True), ("now", "x", True), ("now", 7, False)):
            text = json.dumps({"name": name, "arguments": {"parts": [value]}})
            assert automaton.accepts(text.encode()) == fits
    named, _ = byte_automaton({"json_schema": SYNTAXES["hermes"].schema(tools, "now")})
    assert named.accepts(b'{"name": "now", "arguments": {"parts": ["x"]}}')


def test_templates_tell_the_syntax() -> None:
    qwen = "{% if tools %}<tools>{{ tools }}</tools> use <tool_call> {% endif %}</think>"
    llama = "{% if tools %}Environment: ipython{% endif %}"
    assert syntax_of(qwen) is SYNTAXES["hermes"] and syntax_of(llama) is SYNTAXES["llama"]
    assert syntax_of(llama, "hermes") is SYNTAXES["hermes"]
    assert shows_tools(qwen) and not shows_tools("{{ messages }}") and thinks(qwen)
