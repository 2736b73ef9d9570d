"""Conversations: a request in the model's chat template, and how its answer is read."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.canvas import IntArray
from ..models import DiffusionModel
from ..request.prompts import encode, encode_chat, encode_markup, encode_text, tokenizer_of
from ..runtime.spelling import Spelling
from .requests import GenerateRequest
from .tools import THINK, Forced, Parser, Syntax, shows_tools, syntax_of, thinks

TAIL = 16  # tokens at the end of a prompt, where thoughts may be opened


class Chats:
    """Those of a model whose calls have the syntax ``tool_parser``, or that of its template."""

    def __init__(self, spelling: Spelling, tool_parser: str | None) -> None:
        self.spelling, self.tool_parser = spelling, tool_parser

    @property
    def template(self) -> str:
        """The model's chat template, "" without one."""
        return str(getattr(self.spelling.tokenizer, "chat_template", None) or "")

    @property
    def syntax(self) -> Syntax:
        """How the model writes calls of tools."""
        return syntax_of(self.template, self.tool_parser)

    def shown(self, ask: GenerateRequest) -> Sequence[dict[str, Any]]:
        """The tools that the template shows to the model."""
        return ask.tools if ask.tools and shows_tools(self.template) else ()

    def prompt(self, ask: GenerateRequest, model: DiffusionModel, prompt: Any) -> IntArray:
        """The ids of a prompt."""
        template = dict(ask.template)
        if shown := self.shown(ask):
            template["tools"] = shown
        if ask.continued or not ask.ready:
            ids = encode_chat(model, prompt, ask.continued, ask.ready, template)
        elif ask.suffix and isinstance(prompt, str):  # "": the hole is at the beginning
            ids = np.asarray(encode_text(tokenizer_of(model), prompt, True), np.int64)
        else:
            ids = encode(model, prompt, ask.chat, template)
        if shown and ask.forced and self.syntax.opening:  # the call has begun
            begun = encode_markup(tokenizer_of(model), f"{self.syntax.opening}\n")
            ids = np.concatenate([ids, np.asarray(begun, np.int64)])
        return ids

    def shortened(
        self, model: DiffusionModel, ask: GenerateRequest, prompt: Any, ids: IntArray,
        go_on: Callable[[], None],
    ) -> IntArray:  # fmt: skip
        """The prompt cut to what fits: its last tokens, or of a chat its last turns."""
        length = ask.arguments.get("max_new_tokens", 1)
        room = max(1, model.facts.context_length - length)
        if ask.truncate != "auto":
            return ids[-(room if ask.truncate == -1 else int(ask.truncate)) :]
        lead = 1 if prompt[0]["role"] == "system" else 0
        turns = [i for i in range(lead + 1, len(prompt)) if prompt[i]["role"] == "user"]
        for begin in turns:
            if len(ids) <= room:
                break
            go_on()
            ids = self.prompt(ask, model, [*prompt[:lead], *prompt[begin:]])
        return ids

    def parser(self, ask: GenerateRequest, prompt: IntArray) -> Parser | None:
        """Who reads calls and thoughts out of an answer behind ``prompt``; None: it has neither."""
        names = [tool["function"]["name"] for tool in ask.tools]
        if ask.forced or ask.either:
            return Forced(names, ask.most_calls, ask.either)
        thinking = ask.kind == "chat" and thinks(self.template)
        if not (names or thinking):
            return None
        tail = prompt[-TAIL:].tolist()
        opened = thinking and self.spelling.decode(tail).rstrip().endswith(THINK)
        return self.syntax.parser(names, ask.most_calls, thinking, opened)
