"""What the tokens of a tokenizer stand for: bytes."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from ..core.errors import ConfigError

BLANK = "\u2581"  # what stands for a blank in vocabularies of SentencePiece
# The printable characters that stand for bytes in byte-level vocabularies: most for their own code,
# the others, in their order, for the characters from 256 on.
SHOWN = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
HIDDEN = [byte for byte in range(256) if byte not in SHOWN]
ALPHABET = {chr(b): b for b in SHOWN} | {chr(256 + i): b for i, b in enumerate(HIDDEN)}


@dataclass(frozen=True)
class Vocabulary:
    """``pieces``: the bytes of every id, None for special tokens and ids without a token.

    ``strips``: decoding drops a blank at a text's start.  ``key``: the same for equal ones.
    """

    pieces: tuple[bytes | None, ...] = field(compare=False)
    strips: bool = field(compare=False)
    key: str


_KNOWN: WeakKeyDictionary[Any, tuple[int, Vocabulary]] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Any, name: str = "the model") -> Vocabulary:
    """The vocabulary of a tokenizer of transformers.

    Raises `ConfigError` where tokens are no pieces of bytes.
    """
    if tokenizer is None:
        raise ConfigError(f"{name} came without a tokenizer, which structured output needs")
    known = _KNOWN.get(tokenizer)
    if known is None or known[0] != len(tokenizer):
        known = _KNOWN[tokenizer] = len(tokenizer), _read(tokenizer, name)
    return known[1]


def _read(tokenizer: Any, name: str) -> Vocabulary:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoders = [] if backend is None else list(_decoders(json.loads(backend.to_str())["decoder"]))
    kinds = {decoder["type"] for decoder in decoders}
    blank = any(d["type"] == "Replace" and d["content"] == " " for d in decoders)
    if not kinds & {"ByteLevel", "Metaspace"} and not blank:
        raise ConfigError(
            f"the tokens of {name} are no pieces of text (decoder {'+'.join(sorted(kinds)) or '-'})"
            ": structured output needs a byte-level or a SentencePiece one"
        )
    cleans = getattr(tokenizer, "clean_up_tokenization_spaces", False)
    if cleans and type(backend.model).__name__ != "BPE":  # of those transformers leaves the text
        raise ConfigError(
            f"the tokenizer of {name} takes blanks away when it decodes, so that a text may lose "
            "its structure: set its clean_up_tokenization_spaces to False"
        )
    sentence_piece = partial(_sentence_piece, falls_back="ByteFallback" in kinds)
    as_bytes = _byte_level if "ByteLevel" in kinds else sentence_piece
    added = backend.get_added_tokens_decoder()
    known = tokenizer.get_vocab()  # whose ids may have gaps
    # Where a text begins, this decoder takes all blanks out of its first token.
    takes = any(d["type"] == "Metaspace" and d.get("prepend_scheme") != "never" for d in decoders)
    pieces: list[bytes | None] = [None] * (1 + max(known.values()))
    for token, i in known.items():
        if i not in added or backend.decode([i, i]):  # one that was ever special is left out
            piece = as_bytes(token)
            pieces[i] = None if takes and b" " in piece[1:] else piece or None
    strips = takes or any(d["type"] == "Strip" and d["start"] > 0 for d in decoders)
    digest = hashlib.sha256(repr((pieces, strips)).encode())
    return Vocabulary(tuple(pieces), strips, digest.hexdigest())


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoders(part)
    else:
        yield decoder


def _byte_level(token: str) -> bytes:
    if not all(character in ALPHABET for character in token):
        return token.encode()
    return bytes(ALPHABET[character] for character in token)


def _sentence_piece(token: str, falls_back: bool) -> bytes:
    if falls_back and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace(BLANK, " ").encode()
