"""Texts of holes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..result import Result

HOLE = re.compile(r"\[\[(\d+)(?::.+?)?\]\](?!\])")


def hole_sizes(text: str) -> list[int]:
    """Tokens of each hole of a text such as ``"x = [[8]]"``."""
    return [int(size) for size in HOLE.findall(text)]


def hole_texts(
    result: Result, decode: Callable[[Sequence[int]], str], sizes: Sequence[int] = ()
) -> list[str]:
    """What was written into each hole; without ``sizes`` there is one.

    A hole's text is what its tokens add to the text before them: tokenizers write a token
    differently at the start of a text.
    """
    written = [at for at, step in enumerate(result.order) if step >= 0]
    texts, at = [], 0
    for size in sizes or [len(written)]:
        here = written[at : at + size]
        at += size
        if not here:
            texts.append("")
            continue
        before, after = (decode(result.tokens[:end]) for end in (here[0], here[-1] + 1))
        texts.append(after[len(before) :] if after.startswith(before) else decode(
            [result.tokens[i] for i in here]
        ))  # fmt: skip
    return texts
