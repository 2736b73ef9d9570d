"""The tokenizer of the bundled models: one token per word of the tasks, one per digit, bytes else.

It needs no training: the vocabulary is the lexicon.  Unknown words fall apart into bytes, so any
text can be encoded and decoded back.
"""

import string
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dllm.eval.tasks import TASKS
from dllm.eval.tasks.lexicon import GAINS, LETTERS, LOSSES, NAMES, OBJECTS

EOS, MASK, USER, ASSISTANT, SYSTEM = (
    "<|endoftext|>",
    "<|mdm_mask|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
CONTEXT = 2048  # positions that the bundled diffusion model takes; trained are those of its tasks
# Messages as before where there are no tools; with them a list of these and how they are called,
# calls and their results between tags.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages if message['role'] == 'system' -%}"
    "{%- set ns.system = ns.system + message['content'] | trim -%}"
    "{%- endfor -%}"
    "{%- if tools -%}"
    "{{- '<|system|>' + ns.system + ' Tools:' -}}"
    "{%- for tool in tools -%}{{- ' ' + tool['function'] | tojson -}}{%- endfor -%}"
    """{{- ' Call: <tool_call>{"name": ..., "arguments": {...}}</tool_call>' -}}"""
    "{%- endif -%}"
    "{%- for message in messages if not (tools and message['role'] == 'system') -%}"
    "{%- if message['role'] == 'tool' -%}"
    "{{- '<|user|><tool_response>' + message['content'] | trim + '</tool_response>' -}}"
    "{%- else -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim -}}"
    "{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>' + call['function'] | tojson + '</tool_call>' -}}"
    "{%- endfor -%}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|endoftext|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
# A word, a digit or a sign, each with the blank before it; so "23" is " 2" and "3".
PIECES = Regex(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s+")


@cache
def _lexicon() -> list[str]:
    """Every piece that the tasks can produce, in a stable order."""
    words = {*NAMES, *OBJECTS, *GAINS, *LOSSES, *LETTERS}
    pieces = {f" {word}" for word in words} | {f" {digit}" for digit in string.digits}
    splitter = pre_tokenizers.Split(PIECES, behavior="isolated")
    for task in TASKS.values():
        for example in task.examples(400, split="train"):
            for text in (example.prompt, example.answer):
                pieces |= {piece for piece, _ in splitter.pre_tokenize_str(" " + text)}
    return sorted(pieces)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer from nothing but the task definitions; deterministic."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    specials = [EOS, MASK, USER, ASSISTANT, SYSTEM]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["".join(p for p, _ in byte_level.pre_tokenize_str(piece)) for piece in _lexicon()]
    vocab = {token: i for i, token in enumerate(dict.fromkeys([*specials, *alphabet, *pieces]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(PIECES, behavior="isolated"), byte_level]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    wrap: Any = PreTrainedTokenizerFast
    wrapped: PreTrainedTokenizerFast = wrap(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        additional_special_tokens=[USER, ASSISTANT, SYSTEM],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    return wrapped
