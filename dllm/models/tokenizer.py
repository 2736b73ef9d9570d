"""Tokenizers of checkpoints, loaded natively and completed with what their files leave out."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AddedToken, PreTrainedTokenizerBase

from ..core.errors import CheckpointError, one_line
from .checkpoint import find
from .family import UNIFORM, Family

TokenizerSource = str | os.PathLike[str] | PreTrainedTokenizerBase | None
THINKING = "enable_thinking"  # a switch in the templates of Qwen3
HERE = {"local_files_only": True, "trust_remote_code": False}  # unsaid, it asks the terminal
WHOLE = "tokenizer.json"
FILES = (WHOLE, "vocab.json", "tokenizer.model")


def loader_of(family: Family, folder: Path) -> str:
    """The class of transformers that reads its tokenizer in ``folder``.  A whole one is read as it
    is: classes of networks put their own splitting in place of the file's.  SentencePiece's file
    does not say all: the class does that tokenizer_config.json names."""
    if family.model_class is None or not any((folder / name).exists() for name in FILES[:2]):
        return "AutoTokenizer"
    return "PreTrainedTokenizerFast" if (folder / WHOLE).exists() else family.tokenizer_class


def load_tokenizer(folder: Path, family: Family) -> PreTrainedTokenizerBase | None:
    """The tokenizer in ``folder``, None when there is none.

    The class comes from the family, never remote code.  `CheckpointError` for unreadable files.
    """
    if not any((folder / name).exists() for name in FILES):
        return None
    loader: Any = getattr(transformers, loader_of(family, folder))
    try:
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, **HERE)
    except Exception as error:  # the backends raise many types, all of them about the files
        raise CheckpointError(
            f"the tokenizer files in {folder} cannot be read ({one_line(error)}); download them "
            "again, or pass load(..., tokenizer=...)"
        ) from error
    return tokenizer


def resolve_tokenizer(
    given: TokenizerSource, family: Family, own: Path | None
) -> PreTrainedTokenizerBase | None:
    """``given`` itself, or loaded from the folder or hub id it names; else that of folder ``own``.

    Raises `CheckpointError` when the named place holds no tokenizer.
    """
    if isinstance(given, PreTrainedTokenizerBase):
        return given
    if given is None:
        return load_tokenizer(own, family) if own else None
    result = load_tokenizer(find(given)[0], family)
    if result is None:
        raise CheckpointError(f"{os.fspath(given)!r} holds no tokenizer files")
    return result


def complete_tokenizer(
    tokenizer: PreTrainedTokenizerBase | None, family: Family, mask_id: int | None, vocab_size: int
) -> None:
    """Declare the mask token, add missing special tokens at their published ids, set the template.

    Changes ``tokenizer``, if there is one, in place.  Raises `CheckpointError` when a special token
    has another id than the model knows.
    """
    if tokenizer is None:
        return
    release = family.releases.get(vocab_size)
    for token, wanted in (release.tokens if release else {}).items():
        result = tokenizer.get_vocab().get(token)
        if result is None and len(tokenizer) == wanted:  # the only id that a new token can get
            tokenizer.add_tokens([AddedToken(token, special=True, normalized=False)])
        elif result not in (None, wanted):
            raise CheckpointError(
                f"the tokenizer gives {token} the id {result}, the model {wanted}; use the "
                "tokenizer of the same release"
            )
    if mask_id not in (None, UNIFORM):
        _declare_mask(tokenizer, family, mask_id)
    ours = family.end_of_turn in tokenizer.get_vocab() and family.chat_template is not None
    if ours and (family.replace_chat_template or tokenizer.chat_template is None):
        tokenizer.chat_template = family.chat_template
    template = tokenizer.chat_template
    if family.thinking is not None and isinstance(template, str) and THINKING in template:
        default = str(family.thinking).lower()  # a caller's own value still wins
        setting = f"{{%- set {THINKING} = {THINKING} | default({default}) -%}}"
        if not template.startswith(setting):
            tokenizer.chat_template = setting + template


def _declare_mask(tokenizer: PreTrainedTokenizerBase, family: Family, mask_id: int) -> None:
    vocabulary: Mapping[Any, int] = tokenizer.get_vocab()
    declared = tokenizer.mask_token_id
    result = vocabulary.get(family.mask_token) if declared is None else declared
    if result not in (None, mask_id):
        raise CheckpointError(
            f"the tokenizer's mask token has id {result}, the model's {mask_id}; use the tokenizer "
            f"of the same release or pass load(..., mask_token_id={result})"
        )
    if declared is None and mask_id < len(tokenizer):
        tokenizer.add_special_tokens({"mask_token": tokenizer.convert_ids_to_tokens(mask_id)})
