"""Tokens as text: alone, in a row, in the middle of a text."""

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

from ..core.text import UNFINISHED

LONGEST_CHARACTER = 8  # tokens
ANCHOR = "x"  # some text before tokens whose text is wanted
KNOWN = 2**16  # texts that are remembered


class Spelling:
    """How ``tokenizer`` writes tokens; without one they have no text, nor have ``special`` ones."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special: Collection[int] = ()
        if tokenizer is not None:
            from ..models.model import special_tokens  # takes seconds, as below

            self.special = special_tokens(tokenizer)
        self.middle = lru_cache(KNOWN)(self._middle)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of token ids; special tokens are none unless ``special``."""
        if self.tokenizer is None:
            return ""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))

    def piece(self, token: int) -> str:
        """Text of a token in the middle of a text."""
        return self.middle((token,))

    def _middle(self, ids: tuple[int, ...]) -> str:
        """Text of ``ids`` in the middle of a text: at its start many decoders drop a blank."""
        if self.tokenizer is None:
            return ""
        from ..request.prompts import encode_text  # takes seconds where nothing else needs it

        before = encode_text(self.tokenizer, ANCHOR)[-1:]
        alone, after = self.decode(before, True), self.decode([*before, *ids], True)
        return after[len(alone) :] if after.startswith(alone) else self.decode(ids, True)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Texts of tokens in a row, which together are their text: where a character has several
        tokens, the last one brings it."""
        found, first, start, before = list[str](), 0, 0, ""
        for at in range(len(ids)):
            text = self.decode(ids[first : at + 1], special=True)
            whole = not text.endswith(UNFINISHED) or at - first > LONGEST_CHARACTER
            found.append(text[len(before) :] if whole else "")
            if whole:
                first, start, before = start, at + 1, self.decode(ids[start : at + 1], special=True)
        if found and not whole:
            found[-1] = text[len(before) :]
        return found
