"""``--server``: the same commands, answered by a server."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.config import GenerationConfig
from ..core.declared import MACHINE, about_of
from .frames import BLOCK, COMMITTED, DRAFT, FRESH, MASK, Frame, Span
from .options import CACHE, SAMPLER, Generation, the_servers
from .output import note
from .watch import View, shown_live

if TYPE_CHECKING:
    from ..serve.client import Answer, Client

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FORMS = {"regex": "regex", "choice": "choice", "json_schema": "json"}
LOADED = ("dtype", "device")


def connect(options: Generation, url: str) -> Client:
    """The server at ``url``; refuses options that only it can set."""
    from ..serve.client import Client

    given = {name: getattr(options, name) for name in LOADED} | dict(options.how)
    for name in (*LOADED, *GenerationConfig.fields(MACHINE)):
        if given.get(name, "auto") != "auto":
            raise the_servers("--" + name.replace("_", "-"))
    return Client(url)


def fields(options: Generation) -> dict[str, Any]:
    """What the options are called in a request."""
    declared = GenerationConfig.fields()
    given = {
        about_of(declared[k]).wire or k: v for k, v in options.arguments().items()
        if k not in GenerationConfig.fields(MACHINE)
    }  # fmt: skip
    if "stop" in given:
        given["stop"] = list(given["stop"])
    if "constraints" in given:
        given["constraints"] = {str(k): v for k, v in given["constraints"].items()}
    form = {sent: given.pop(name) for name, sent in FORMS.items() if name in given}
    if form:
        if "json" in form:
            from ..structured.source import schema_of

            form["json"] = schema_of(form["json"])
        given["structured_outputs"] = form
    return given


def request(options: Generation, prompt: Any, trace: bool = False) -> dict[str, Any]:
    """The body for ``prompt``, a string to continue or messages."""
    body = fields(options)
    if candidates := body.pop("top_candidates", None):
        chat = {"logprobs": True, "top_logprobs": candidates}
        body |= {"logprobs": candidates} if isinstance(prompt, str) else chat
    if options.sampler != SAMPLER:
        body["sampler"] = options.sampler
    if options.cache != CACHE:
        body["cache"] = options.cache
    if options.model != "nano":
        body["model"] = options.model
    if trace:
        body["trace"] = True
    if options.watch:
        body["stream_options"] = {"include_drafts": True}
    return {**body, "prompt" if isinstance(prompt, str) else "messages": prompt}


def ask(client: Client, options: Generation, prompt: Any, trace: bool = False) -> Answer:
    """The complete answer, watched or not."""
    path = TEXT if isinstance(prompt, str) else CHAT
    answers = client.answer(path, request(options, prompt, trace))
    if options.watch:
        with shown_live() as view:
            return _last(_watched(answers, view))
    return _last(answers)


def generate(url: str, prompts: list[str], options: Any, files: list[Path]) -> None:
    """``dllm generate --server``."""
    client = connect(options, url)
    for row, prompt in enumerate(prompts):
        said = prompt if options.raw else [{"role": "user", "content": prompt}]
        answer = ask(client, options, said, bool(files))
        if files:
            files[row].write_text(json.dumps(answer.trace), encoding="utf-8")
        print(as_json(answer) if options.json else answer.text, flush=True)
        if not options.json or options.watch:
            note(answer.footer())


def as_json(answer: Answer) -> str:
    """One line of JSON."""
    return json.dumps(
        {"text": answer.text, "finish_reason": answer.finish_reason, **answer.usage,
         **answer.figures}, ensure_ascii=False,
    )  # fmt: skip


def _last(answers: Iterator[Answer]) -> Answer:
    result, *_ = deque(answers, maxlen=1)
    return result


def _watched(answers: Iterator[Answer], view: View) -> Iterator[Answer]:
    """The answers, while every step is shown."""
    from ..core.canvas import Edit  # with NumPy, which the help does without

    length, tokens = 0, dict[int, str]()
    for answer in answers:
        frame = answer.frame
        if frame is not None and frame["type"] == "canvas":
            length, tokens = frame["length"], {at: text for at, text in frame["given"] if at >= 0}
        elif frame is not None:
            for edit in [Edit(*values) for values in frame.get("edits", ())]:
                moved = {edit.moved(at): text for at, text in tokens.items()}
                tokens = {at: text for at, text in moved.items() if at is not None}
                tokens |= dict.fromkeys(range(edit.at, edit.at + edit.added * edit.written), "")
                length += edit.added - edit.removed
            length = min(length, frame.get("end", length))
            view.show(picture(frame, length, tokens))
        yield answer


def picture(step: dict[str, Any], length: int, tokens: dict[int, str]) -> Frame:
    """The canvas after ``step``; ``tokens``, position -> text, is brought up to date."""
    fresh = {at: text for at, text, *_ in step["commit"]}
    drafts = {at: text for at, text, *_ in step["draft"]}
    tokens.update(fresh)
    for at in step["remask"]:
        tokens.pop(at, None)
    spans: list[Span] = []
    for at in range(length):
        kind = FRESH if at in fresh and at in tokens else COMMITTED if at in tokens else (
            DRAFT if at in drafts else MASK
        )  # fmt: skip
        text = BLOCK if kind == MASK else tokens.get(at, drafts.get(at, ""))
        if spans and spans[-1].kind == kind:
            spans[-1] = Span(kind, spans[-1].text + text)
        else:
            spans.append(Span(kind, text))
    decided = sum(at in tokens for at in range(length))
    return Frame(
        row=step["index"], step=step["step"], nfe=step["forwards"], decided=decided, total=length,
        spans=tuple(spans), finished=decided == length,
    )  # fmt: skip
