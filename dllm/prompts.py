"""From what users pass as a prompt to token ids.

A prompt is a string, chat messages, or token ids.  Text in a prompt is text: where it happens to
spell a special token, such as the mask, it is encoded as ordinary characters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .canvas import IntArray
from .errors import PromptError
from .models import DiffusionModel

Message = Mapping[str, str]
KINDS = "a prompt is a string, chat messages or token ids"
MARK = "\ue000"  # stands for what is said
Prompt = str | Sequence[Message] | Sequence[int] | IntArray | torch.Tensor


def is_batch(prompt: Any) -> bool:
    """Whether ``prompt`` is several prompts: a list of strings, of conversations, of id lists."""
    if isinstance(prompt, str | Mapping) or not isinstance(prompt, Iterable):
        return False
    if isinstance(prompt, np.ndarray | torch.Tensor):
        return prompt.ndim > 1
    items = list(prompt)
    return bool(items) and not isinstance(items[0], Mapping | int | np.integer)


def encode(model: DiffusionModel, prompt: Any, chat: bool | None = None) -> IntArray:
    """Token ids (P,) int64 of one prompt.

    ``chat``: wrap a string in the model's chat template as a user message; None (default) does
    so when there is a template.
    """
    prompt = checked(prompt)
    if isinstance(prompt, str):
        tokenizer = _tokenizer(model)
        if chat is None:
            chat = bool(tokenizer.chat_template)
        return _template(tokenizer, [{"role": "user", "content": prompt}]) if chat else np.asarray(
            encode_text(tokenizer, prompt, add_special_tokens=True), np.int64
        )  # fmt: skip
    if isinstance(prompt[0], Mapping):
        return _template(_tokenizer(model), prompt)
    return _ids(model, prompt)


def checked(prompt: Any) -> str | list[Any]:
    """The prompt as a string, a list of messages or a list of ids.

    Raises `PromptError` where it is none of these, empty, or not Unicode.
    """
    if isinstance(prompt, np.ndarray | torch.Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping):
        prompt = [prompt]
    if not isinstance(prompt, str):
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise PromptError(f"{KINDS}, not {prompt!r}")
        prompt = list(prompt)
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise PromptError("the prompt is empty: give some text, messages or token ids")
    texts = [prompt]
    if isinstance(prompt[0], Mapping):
        for message in prompt:
            if not isinstance(message, Mapping) or {"role", "content"} - set(message):
                raise PromptError("chat messages look like {'role': 'user', 'content': 'text'}")
        texts = [str(message["content"]) for message in prompt]
    elif not isinstance(prompt, str):
        texts = []
        for item in prompt:
            if not isinstance(item, int | np.integer) or isinstance(item, bool):
                raise PromptError(f"{KINDS}, not a list with {item!r}")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is not valid Unicode: {error.reason}") from None
    return prompt if isinstance(prompt, str) else list(prompt)


def _tokenizer(model: DiffusionModel) -> PreTrainedTokenizerBase:
    if model.tokenizer is None:
        raise PromptError(f"{model.name} came without a tokenizer: pass token ids as the prompt")
    return model.tokenizer


def _ids(model: DiffusionModel, items: Sequence[Any]) -> IntArray:
    ids = np.asarray(items, np.int64)
    if ids.min() < 0 or ids.max() >= model.facts.vocab_size:
        raise PromptError(
            f"token id {int(ids.max() if ids.min() >= 0 else ids.min())} is outside the "
            f"vocabulary of {model.facts.vocab_size}: was the prompt made with another tokenizer?"
        )
    return ids


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = False
) -> list[int]:
    """Ids of plain text: nothing in it is taken for a special token."""
    ids = tokenizer(
        text, add_special_tokens=add_special_tokens, split_special_tokens=True, verbose=False
    )
    return list(ids["input_ids"])


def encode_continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of text in the middle of other text: no blank is put in front of it.

    Many tokenizers do that at the start of what they are given, so the text is encoded behind a
    character that does not merge with it.
    """
    anchor = "\n" if text[:1].isalnum() else "a"
    head = encode_text(tokenizer, anchor)
    ids = encode_text(tokenizer, anchor + text)
    return ids[len(head) :] if ids[: len(head)] == head else encode_text(tokenizer, text)


def encode_chat(
    model: DiffusionModel, messages: Sequence[Message], continued: bool = False
) -> IntArray:
    """Ids (P,) of a conversation, ready for the answer, or with ``continued`` for the rest of its
    last message, which is the answer's beginning."""
    checked(messages)
    return _template(_tokenizer(model), messages, continued)


def chat_openings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """What conversations begin with in the model's template, with and without a system prompt."""
    if not tokenizer.chat_template:
        return ()
    user = {"role": "user", "content": MARK}
    result = []
    for messages in ([user], [{"role": "system", "content": MARK}, user]):
        with suppress(Exception):  # some templates refuse a system prompt, in their own way
            shown = str(tokenizer.apply_chat_template(messages, tokenize=False))
            result.append(shown.partition(MARK)[0])
    return tuple(text for text in result if text.strip())


def _template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], continued: bool = False
) -> IntArray:
    """Ids of a conversation in the model's template."""
    if not tokenizer.chat_template:
        raise PromptError("this model has no chat template: pass a string or token ids")
    specials = [token for token in tokenizer.all_special_tokens if token]
    marks = [f"\ue000{i}\ue001" for i in range(len(messages))]
    unsafe = any(token in str(m["content"]) for token in specials for m in messages)
    shown = [
        {**m, "content": mark} if unsafe else dict(m)
        for m, mark in zip(messages, marks, strict=True)
    ]
    text = tokenizer.apply_chat_template(
        shown, tokenize=False, add_generation_prompt=not continued,
        continue_final_message=continued,
    )  # fmt: skip
    assert isinstance(text, str)
    ids: list[int] = []
    for mark, message in zip(marks, messages, strict=True) if unsafe else ():
        before, result, text = text.partition(mark)
        if not result:
            before, text = "", before
            continue
        ids += _encode_markup(tokenizer, before)
        ids += encode_text(tokenizer, str(message["content"]).strip())
    ids += _encode_markup(tokenizer, text)
    return np.asarray(ids, np.int64)


def _encode_markup(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a rendered template, whose special tokens are meant."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
