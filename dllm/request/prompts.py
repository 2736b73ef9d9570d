"""From what users pass as a prompt to token ids.

A prompt is a string, chat messages, or token ids.  Text in a prompt is text: where it happens to
spell a special token, such as the mask, it is encoded as ordinary characters.
"""

import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..core.canvas import BoolArray, IntArray
from ..core.errors import ConfigError, PromptError, UnknownNameError, check_unicode, one_line, short
from ..core.text import holes_in
from ..models import DiffusionModel
from ..models.model import special_tokens

Message = Mapping[str, Any]
TEMPLATE_ARGUMENTS = ("messages", "add_generation_prompt", "continue_final_message", "tokenize")
KINDS = "a prompt is a string, chat messages or token ids"
MARK = "\ue000"  # stands for what is said
SEEMING_HOLE = re.compile(r"\[\[[^\[\]]{0,40}\]\]")
LOCKS: WeakKeyDictionary[PreTrainedTokenizerBase, threading.Lock] = WeakKeyDictionary()
OPENINGS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[str, tuple[str, ...]]] = (
    WeakKeyDictionary()
)
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
OnePrompt = str | Sequence[Message] | Sequence[int] | IntArray | torch.Tensor
ManyPrompts = list[str] | list[list[int]] | list[list[dict[str, str]]] | list[IntArray]


def is_batch(prompt: Any) -> bool:
    """Whether ``prompt`` is several prompts: a list of strings, of conversations, of id lists."""
    if isinstance(prompt, Iterator | Set):
        raise PromptError(f"several prompts are a list, not a {type(prompt).__name__}: list(...)")
    if isinstance(prompt, str | Mapping) or not isinstance(prompt, Iterable):
        return False
    if isinstance(prompt, np.ndarray | torch.Tensor):
        return prompt.ndim > 1
    items = list(prompt)
    return bool(items) and not (
        isinstance(items[0], int | np.integer)
        or (isinstance(items[0], Mapping) and "input_ids" not in items[0])
    )


def encode(
    model: DiffusionModel, prompt: Any, chat: bool | None = None,
    template: Mapping[str, Any] = MappingProxyType({}),
) -> IntArray:  # fmt: skip
    """Token ids (P,) int64 of one prompt.

    ``chat``: wrap a string in the model's chat template as a user message; None (default) does
    so when there is a template.  ``template``: variables that a chat template reads, such as
    ``tools`` or Qwen's ``enable_thinking``; others change nothing.
    """
    if not isinstance(chat, bool | None):
        raise ConfigError(f"chat is True, False or None, not {short(chat)}")
    ids = check_ids(model, _encoded(model, checked(prompt), chat, template))
    image = model.facts.image_token_id
    if image is not None and (ids == image).any():
        raise PromptError(
            f"the prompt holds an image, and {model.name} is read as a model of text: leave it out"
        )
    return ids


def _encoded(
    model: DiffusionModel, prompt: Any, chat: bool | None, template: Mapping[str, Any]
) -> list[int]:
    if isinstance(prompt, str):
        tokenizer = tokenizer_of(model)
        if chat is None:
            chat = bool(tokenizer.chat_template)
        if chat and prompt.startswith(chat_openings(tokenizer)):
            warnings.warn(
                "this string went through the chat template already and is wrapped again: pass "
                "the messages, or what apply_chat_template(..., tokenize=True) gives",
                UserWarning,
                stacklevel=2,
            )
        if chat:
            return _template(tokenizer, [{"role": "user", "content": prompt}])
        return encode_text(tokenizer, prompt, add_special_tokens=True)
    if isinstance(prompt[0], Mapping):
        return _template(tokenizer_of(model), prompt, variables=template)
    return list(prompt)


def checked(prompt: Any) -> str | list[Any]:
    """The prompt as a string, a list of messages with texts, or a list of ids.

    Raises `PromptError` where it is none of these, empty, or not Unicode.
    """
    if isinstance(prompt, np.ndarray | torch.Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping):
        if "input_ids" in prompt:
            raise PromptError("what a tokenizer returns is no prompt: pass its ['input_ids']")
        prompt = [prompt]
    if not isinstance(prompt, str):
        if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
            raise PromptError(f"{KINDS}, not {short(prompt)}")
        prompt = list(prompt)
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise PromptError("the prompt is empty: give some text, messages or token ids")
    if isinstance(prompt, str):
        check_unicode(prompt)
        return prompt
    return _messages(prompt) if isinstance(prompt[0], Mapping) else _numbers(prompt, KINDS)


def _messages(prompt: Sequence[Any]) -> list[Any]:
    """Messages whose contents are texts; parts of text are joined."""
    result = []
    for message in prompt:
        if not isinstance(message, Mapping) or {"role", "content"} - set(message):
            raise PromptError("chat messages look like {'role': 'user', 'content': 'text'}")
        if message["role"] not in ROLES:
            raise UnknownNameError("role of a message", message["role"], ROLES)
        content = message["content"]
        if content is None and message.get("tool_calls"):
            content = ""
        if isinstance(content, list | tuple):
            content = "".join(map(_part, content))
        if not isinstance(content, str):
            raise PromptError(f"the content of a message is a text, not {short(content)}")
        check_unicode(content)
        result.append({**message, "content": content})
    return result


def _part(part: Any) -> str:
    """The text of a part of a content, such as ``{"type": "text", "text": "Hello"}``."""
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise PromptError("only texts can be read: parts are {'type': 'text', 'text': ...}")
    return str(part["text"])


def _numbers(items: Sequence[Any], kinds: str) -> list[int]:
    """Whole numbers as such."""
    for item in items:
        if not isinstance(item, int | np.integer) or isinstance(item, bool):
            raise PromptError(f"{kinds}, not a list with {short(item)}")
    return [int(item) for item in items]


def tokenizer_of(
    model: DiffusionModel, instead: str = "pass token ids as the prompt"
) -> PreTrainedTokenizerBase:
    """Its tokenizer; where it has none, a `PromptError` says what to do ``instead``."""
    if model.tokenizer is None:
        raise PromptError(f"{model.name} came without a tokenizer: {instead}")
    return model.tokenizer


def check_ids(model: DiffusionModel, ids: Sequence[int], least: int = 0) -> IntArray:
    """``ids`` as an array (P,) int64.  Raises `PromptError` for one outside the vocabulary; those
    from ``least`` on pass."""
    size = model.facts.vocab_size
    for token in ids:
        if not least <= token < size:
            raise PromptError(
                f"token id {short(token)} is outside the vocabulary of {size}: were the ids made "
                "with another tokenizer?"
            )
    return np.asarray(ids, np.int64)


def encode_holes(model: DiffusionModel, text: Any) -> tuple[IntArray, BoolArray, tuple[int, ...]]:
    """A text with ``[[n]]`` holes, or ids with -1 or masks for them: ids (n,), any at holes, where
    the holes are, and how long each is.

    Raises `PromptError` where there is no hole, or more than the context holds.
    """
    array = encode_open(model, text, "a text to fill in")
    holes = (array == -1) | (array == model.facts.mask_token_id)
    sizes = tuple(int(hole.size) for hole in holes_in(text) if hole.plain)
    if 0 in sizes:
        raise PromptError("[[0]] is a hole of no tokens: write how many it has, from 1")
    if not holes.any():
        own = None if model.tokenizer is None else model.tokenizer.mask_token
        for mask in (own, "[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>"):
            if isinstance(text, str) and mask and str(mask) in text:
                raise PromptError(
                    f"{mask} marks no hole: write [[1]] for each of them, or [[8]] for 8 tokens"
                )
        mark = SEEMING_HOLE.search(text) if isinstance(text, str) else None
        odd = "" if mark is None else f"; {short(mark[0])} is none"
        raise PromptError(
            f"there is no hole to fill: mark one as [[8]] (tokens), or -1 among ids{odd}"
        )
    if not isinstance(text, str):
        sizes = tuple(len(list(run)) for hole, run in groupby(holes.tolist()) if hole)
    return np.maximum(array, 0), holes, sizes


def check_lengths_alone(text: Any, what: str) -> None:
    """Raises for a hole that says more than how long it is, where nothing heeds that."""
    for hole in holes_in(text):
        if hole.form or not hole.plain:
            raise PromptError(
                f"{what} has holes of known length alone, such as [[8]], not "
                f"{short(text[hole.first : hole.behind])}: infill takes those"
            )


def encode_open(model: DiffusionModel, text: Any, what: str, continued: bool = False) -> IntArray:
    """Ids (n,) of a text with ``[[n]]`` holes, or of ids, -1 where it is open; ``continued``: it
    stands behind other text."""
    if isinstance(text, str):
        return check_ids(model, _pieces(model, text, continued), least=-1)
    kinds = f"{what} is a string with [[8]] for 8 tokens, or token ids with -1"
    if isinstance(text, np.ndarray | torch.Tensor):
        text = text.tolist()
    if isinstance(text, Mapping | bytes) or not isinstance(text, Iterable):
        raise PromptError(f"{kinds}, not {short(text)}")
    return check_ids(model, _numbers(list(text), kinds), least=-1)


def without_forms(text: str) -> str:
    """The text with the length of each hole alone."""
    parts, behind = list[str](), 0
    for hole in holes_in(text):
        parts += [text[behind : hole.first], f"[[{hole.size}]]"]
        behind = hole.behind
    return "".join([*parts, text[behind:]])


def _pieces(model: DiffusionModel, text: str, continued: bool = False) -> list[int]:
    """Ids of a text, -1 for each position of a hole."""
    tokenizer = tokenizer_of(model, "pass ids with -1 for holes")
    limit = model.facts.context_length
    ids: list[int] = []
    behind = 0
    for hole in [*(hole for hole in holes_in(text) if hole.plain), None]:
        if piece := text[behind : None if hole is None else hole.first]:
            follows = bool(ids) or continued
            ids += (encode_continuation if follows else encode_text)(tokenizer, piece)
        if hole is not None:
            if len(hole.size) > 9 or int(hole.size) > limit:
                raise PromptError(
                    f"a hole of {hole.size[:20]} tokens exceeds the context of {limit}: make it "
                    "smaller"
                )
            ids += [-1] * int(hole.size)
            behind = hole.behind
    return ids


def encode_text(
    tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = False
) -> list[int]:
    """Ids of plain text: nothing in it is taken for a special token."""
    return _ids_of(
        tokenizer, text, add_special_tokens=add_special_tokens, split_special_tokens=True
    )


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
    model: DiffusionModel, messages: Sequence[Message], continued: bool = False,
    ready: bool = True, variables: Mapping[str, Any] = MappingProxyType({}),
) -> IntArray:  # fmt: skip
    """Ids (P,) of a conversation, ``ready`` for the answer, or with ``continued`` for the rest of
    its last message, which is the answer's beginning.  ``variables``: of the chat template."""
    messages = _messages(list(messages))
    begun = ready and not continued
    return check_ids(model, _template(tokenizer_of(model), messages, continued, begun, variables))


def chat_openings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """What conversations begin with in the model's template, with and without a system prompt;
    remembered as long as the template stays."""
    if not tokenizer.chat_template:
        return ()
    template, known = str(tokenizer.chat_template), OPENINGS.get(tokenizer)
    if known is not None and known[0] == template:
        return known[1]
    user, result = {"role": "user", "content": MARK}, []
    for messages in ([user], [{"role": "system", "content": MARK}, user]):
        with suppress(Exception):  # some templates refuse a system prompt, in their own way
            shown = str(tokenizer.apply_chat_template(messages, tokenize=False))
            result.append(shown.partition(MARK)[0])
    OPENINGS[tokenizer] = template, tuple(text for text in result if text.strip())
    return OPENINGS[tokenizer][1]


def _template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], continued: bool = False,
    ready: bool = True, variables: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:  # fmt: skip
    """Ids of a conversation in the model's template.  Special tokens are meant where the template
    writes them: spelled in a content they are text, elsewhere in a message they are refused."""
    if not tokenizer.chat_template:
        raise PromptError("this model has no chat template: pass a string or token ids")
    for name in variables:
        if name in TEMPLATE_ARGUMENTS:
            raise PromptError(f"{name} is no variable of a chat template: drop it")
    template = str(tokenizer.chat_template)
    variables = {k: v for k, v in variables.items() if re.search(rf"\b{re.escape(k)}\b", template)}
    specials = special_tokens(tokenizer).values()
    contents = {f"\ue000{i}\ue001": str(m["content"]) for i, m in enumerate(messages)}
    unsafe = any(token in content for token in specials for content in contents.values())
    rest = str([{**m, "content": ""} for m in messages] + list(variables.values()))
    spelled = next((token for token in specials if token in rest), None)
    if spelled is not None:
        raise PromptError(f"{spelled} stands in a tool or a call of one: there it cannot be text")
    shown = [
        {**m, "content": content.replace(content.strip() or mark, mark)} if unsafe else dict(m)
        for m, (mark, content) in zip(messages, contents.items(), strict=True)
    ]
    try:
        text = tokenizer.apply_chat_template(
            shown, tokenize=False, add_generation_prompt=ready,
            continue_final_message=continued, **variables,
        )  # fmt: skip
    except Exception as error:  # templates are programs, which refuse in ways of their own
        raise PromptError(f"the chat template refuses the messages: {one_line(error)}") from error
    assert isinstance(text, str)
    ids: list[int] = []
    parts = re.split(f"({'|'.join(contents)})", text) if unsafe else [text]
    for before, part in pairwise(["", *parts]):
        if part in contents:  # in any order: some templates move messages
            encode = encode_text if _opens(tokenizer, before) else encode_continuation
            ids += encode(tokenizer, contents[part].strip())
        else:
            ids += encode_markup(tokenizer, part)
    return ids


def _opens(tokenizer: PreTrainedTokenizerBase, markup: str) -> bool:
    """Whether text behind ``markup`` is encoded as at the start of a text, as many tokenizers do
    behind their special tokens."""
    behind = len(encode_markup(tokenizer, markup))
    return encode_markup(tokenizer, markup + "a")[behind:] == encode_text(tokenizer, "a")


def encode_markup(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of a rendered template, whose special tokens are meant."""
    return _ids_of(tokenizer, text, add_special_tokens=False, split_special_tokens=False)


def _ids_of(tokenizer: PreTrainedTokenizerBase, text: str, **how: bool) -> list[int]:
    """One thread at a time: a tokenizer keeps ``split_special_tokens`` as state meanwhile."""
    check_unicode(text)
    with LOCKS.setdefault(tokenizer, threading.Lock()):
        return list(tokenizer(text, verbose=False, **how)["input_ids"])
