"""Calls of tools, and thoughts, in what a model writes: a syntax per family of chat templates.

A parser reads text that only grows, and what it has said of it stays: an opening tag that may be
incomplete is held back, and a call is there when all of it is, so that no delta of a stream is ever
taken back.  What looks like a call and is none stays text.
"""

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.errors import UnknownNameError
from ..core.text import held_back
from ..structured.keywords import rebased

THINK, THOUGHT = "<think>", "</think>"
INSTANCE = "response.format"  # which no tool is called
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Call:
    """A call of the tool ``name``; ``arguments`` is JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id, "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }  # fmt: skip


@dataclass
class Said:
    """What an answer says, as far as it is final."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


class Parser(ABC):
    """Reads one answer.  ``names``: the tools that can be called, none: calls are text;
    ``most``: calls of one answer."""

    def __init__(self, names: Collection[str], most: int) -> None:
        self.names, self.most = names, most
        self.said = Said()

    @abstractmethod
    def feed(self, piece: str) -> None:
        """More of the text."""

    @abstractmethod
    def end(self) -> None:
        """The text is complete."""

    def take(self, text: str) -> bool:
        """Add the calls in ``text``, JSON; False where that is something else."""
        calls = calls_in(text, self.names)
        self.said.calls += calls[: max(0, self.most - len(self.said.calls))]
        return bool(calls)


class Tagged(Parser):
    """Calls between tags, thoughts between others, which the prompt opens where ``thinking``.
    Without an ``opening`` tag calls are all that is no thought."""

    def __init__(
        self, names: Collection[str], most: int, opening: str, closing: str, thinks: bool,
        thinking: bool,
    ) -> None:  # fmt: skip
        super().__init__(names, most)
        self.opening, self.closing = opening, closing
        self.bare: Bare | None = None  # reads calls that have no tags
        if names and not opening:
            self.bare = Bare(names, most)
            self.bare.said = self.said
        self.open = [tag for tag, on in ((THINK, thinks), (opening, names and opening)) if on]
        self.inside = THINK if thinking else ""  # the tag that is open
        self.fresh = thinking  # blanks behind a tag are not said, nor those before one
        self.rest = ""  # not said yet

    @property
    def calling(self) -> bool:
        return bool(self.inside) and self.inside == self.opening

    def feed(self, piece: str) -> None:
        self.rest += piece
        while self._advance():
            pass

    def _advance(self) -> bool:
        """Go on to the next tag; False where it is not there yet."""
        if self.fresh:
            self.rest = self.rest.lstrip()
            self.fresh = not self.rest
        closing = self.closing if self.calling else THOUGHT
        tags = [closing] if self.inside else self.open
        found = min(((self.rest.find(tag), tag) for tag in tags if tag in self.rest), default=None)
        if found is None:
            if not self.calling:
                self._say(self._sure(tags))
            return False
        (at, tag), before = found, self.rest[: found[0]]
        self.rest = self.rest[at + len(tag) :]
        if self.calling:
            self.inside, self.fresh = "", self.take(before)
            if not self.fresh:
                self.said.content += f"{self.opening}{before}{self.closing}"
            return True
        self._say(before.rstrip())
        self.inside = "" if self.inside else tag
        self.fresh = not self.calling
        return True

    def _sure(self, tags: Sequence[str]) -> str:
        """The rest without what may belong to a tag, or to the blanks before one."""
        count = len(self.rest) - held_back(self.rest, tags)
        piece = self.rest[:count].rstrip() if tags else self.rest
        self.rest = self.rest[len(piece) :]
        return piece

    def _say(self, piece: str) -> None:
        if self.inside == THINK:
            self.said.reasoning += piece
        elif self.bare is not None:
            self.bare.feed(piece)
        else:
            self.said.content += piece

    def end(self) -> None:
        if not self.calling:
            self._say(self.rest)
        elif not self.take(self.rest):
            self.said.content += self.opening + self.rest
        if self.bare is not None:
            self.bare.end()
        self.rest = ""


class Bare(Parser):
    """Calls as JSON without tags, which are all of the answer: Llama's."""

    def __init__(self, names: Collection[str], most: int) -> None:
        super().__init__(names, most)
        self.text = ""

    def feed(self, piece: str) -> None:
        self.text += piece
        if self.said.content or not self.text.lstrip().startswith(("{", "[")):
            self.said.content = self.text if self.text.strip() else ""

    def end(self) -> None:
        if not self.said.content and not self.take(self.text):
            self.said.content = self.text


class Forced(Parser):
    """Calls that a schema has written, without tags: their arguments are there as they come.
    ``either``: or an instance of something else, which is said once it cannot be a call."""

    HEAD = re.compile(
        r'([\s\[,]*)\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
        r'"(?:arguments|parameters)"\s*:\s*(?=\S)'
    )
    STRING = re.compile(r'(?:[^"\\]|\\.)*("?)', re.DOTALL)
    SIGN = re.compile(r'[][{}"]')

    def __init__(self, names: Collection[str], most: int, either: bool = False) -> None:
        super().__init__(names, most)
        self.either = either
        self.rest, self.depth, self.quoted = "", 0, False  # brackets and quotes that are open

    def feed(self, piece: str) -> None:
        self.rest += piece
        while self._advance():
            pass
        begun = "".join(self.rest[:32].split())[:9]
        if self.either and not self.said.calls and begun[:1] != "[":
            self.said.content = "" if '{"name":"'.startswith(begun) else self.rest

    def _advance(self) -> bool:
        """Go on to the next bracket, quote or call; False where it is not there yet."""
        if not self.depth:
            head = self.HEAD.match(self.rest)
            if head is None or len(self.said.calls) == self.most:
                return False
            name = json.loads(head[2])
            if self.either and (name not in self.names or head[1].strip()):
                return False
            self.said.calls.append(Call(name, ""))
            self.rest, self.depth = self.rest[head.end() :], 1
            return True
        if self.quoted:
            found = self.STRING.match(self.rest)
            assert found is not None  # of an empty text, too
            self.quoted = not found[1]
            self._write(found.end())
            return not self.quoted
        sign = self.SIGN.search(self.rest)
        if sign is None:
            self._write(len(self.rest))
            return False
        self.quoted = sign[0] == '"'
        self.depth += {'"': 0, "[": 1, "{": 1}.get(sign[0], -1)
        self._write(sign.end() if self.depth else sign.start())
        self.rest = self.rest if self.depth else self.rest[1:]
        return True

    def _write(self, count: int) -> None:
        call = self.said.calls[-1]
        more, self.rest = self.rest[:count], self.rest[count:]
        self.said.calls[-1] = replace(call, arguments=call.arguments + more)

    def end(self) -> None:
        if not self.said.calls and (self.said.content or not self.take(self.rest)):
            self.said.content = self.rest
        elif self.depth:
            self._write(len(self.rest))


def calls_in(text: str, names: Collection[str]) -> list[Call]:
    """The calls in ``text``: JSON objects one after the other, or a list of them; none at all where
    anything in it is something else."""
    decoder, items, at = json.JSONDecoder(), list[Any](), 0
    try:
        while at < len(text.rstrip()):
            at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n;"))
            item, at = decoder.raw_decode(text, at)
            items += item if isinstance(item, list) else [item]
    except (ValueError, RecursionError):
        return []
    calls = []
    for item in items:
        if not isinstance(item, dict) or item.get("name") not in names:
            return []
        given = item.get("arguments", item.get("parameters", {}))
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        calls.append(Call(item["name"], arguments))
    return calls


@dataclass(frozen=True)
class Syntax:
    """How a family writes a call: name and ``arguments`` in JSON, ``opening`` to ``closing``."""

    opening: str
    closing: str
    arguments: str = "arguments"

    def parser(
        self, names: Collection[str], most: int, thinks: bool = False, thinking: bool = False
    ) -> Parser:
        if not self.opening and not thinks:
            return Bare(names, most)
        return Tagged(names, most, self.opening, self.closing, thinks, thinking)

    def schema(
        self, tools: Sequence[dict[str, Any]], choice: str, several: bool = False,
        instance: Any = None,
    ) -> dict[str, Any]:  # fmt: skip
        """JSON schema of a call of one of ``tools``, or of the one that ``choice`` names;
        ``several``: or of a list of calls, where the family's models can make more than one;
        ``instance``: or of something else that has this schema."""
        calls = [
            {
                "type": "object", "required": ["name", self.arguments],
                "additionalProperties": False,
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    self.arguments: {"$ref": f"#/$defs/{tool['function']['name']}"},
                },
            }
            for tool in tools if choice in ("required", tool["function"]["name"])
        ]  # fmt: skip
        call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if several and self.opening:
            call = {"anyOf": [call, {"type": "array", "items": call, "minItems": 2}]}
        parts: dict[str, Any] = {}
        for function in (tool["function"] for tool in tools):
            given = function.get("parameters") or NOTHING  # some clients write ``strict`` into it
            parts[function["name"]] = {key: given[key] for key in given if key != "strict"}
        if instance is not None:
            parts[INSTANCE] = instance
            call = {"anyOf": [{"$ref": f"#/$defs/{INSTANCE}"}, call]}
        defs = {name: rebased(part, ("$defs", name)) for name, part in parts.items()}
        return {"$defs": defs} | call


SYNTAXES = {
    "hermes": Syntax("<tool_call>", "</tool_call>"),  # Qwen, Ling, LLaDA2
    "llama": Syntax("", "", "parameters"),
}


def syntax_of(template: str, named: str | None = None) -> Syntax:
    """The syntax that is ``named``, else the one that a chat template asks the model for."""
    if named is not None:
        if named not in SYNTAXES:
            raise UnknownNameError("tool parser", named, SYNTAXES)
        return SYNTAXES[named]
    bare = "<tool_call>" not in template and re.search(r"\bipython\b", template)
    return SYNTAXES["llama" if bare else "hermes"]


def shows_tools(template: str) -> bool:
    """Whether a chat template tells the model which tools there are."""
    return bool(re.search(r"\btools\b", template))


def thinks(template: str) -> bool:
    """Whether models with this chat template think in tags."""
    return THOUGHT in template
