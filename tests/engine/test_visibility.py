"""Who sees whom, against tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dllm.canvas import Canvas
from dllm.engine.visibility import Visibility
from dllm.models.attention import Segment

CPU = torch.device("cpu")


def canvas(text: str) -> Canvas:
    """``x`` is decided, ``.`` is not."""
    masked = np.array([letter == "." for letter in text])
    tokens = np.where(masked, 9, 1)
    return Canvas(tokens, masked, 0, 0, len(text), mask_id=9, pad_id=0)


def seen(segments: list[Segment], queries: int, keys: int) -> list[list[int]]:
    """Slots that each query reads."""
    result: list[Any] = [None] * queries
    for segment in segments:
        at = segment.keys
        slots = np.arange(keys)[at] if isinstance(at, slice) else at.numpy()
        for i, query in enumerate(range(queries)[segment.queries]):
            open_ = slice(None) if segment.mask is None else segment.mask[i].numpy() == 0
            assert result[query] is None
            result[query] = slots[open_].tolist()
    return result


TABLE = [
    (Visibility(), "x.x.", [[0, 1, 2, 3]] * 4),
    (Visibility(2), "x.x.", [[0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]),
    (Visibility(decided_first=True), "xxxx", [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
    (Visibility(decided_first=True), "x.x.", [[0], [0, 1, 2], [0, 2], [0, 1, 2, 3]]),
    (Visibility(decided_first=True), "..xx", [[0, 2, 3], [0, 1, 2, 3], [2], [2, 3]]),
]


@pytest.mark.parametrize(("visibility", "text", "expected"), TABLE)
def test_what_every_position_sees(
    visibility: Visibility, text: str, expected: list[list[int]]
) -> None:
    row, n = canvas(text), len(text)
    everything = np.arange(n)
    assert seen(visibility.segments(row, everything, None, 0, 0, n, CPU), n, n) == expected
    hidden = visibility.unseen(row, everything, everything)
    assert [np.flatnonzero(~h).tolist() for h in hidden] == expected
    # some queries, keys in slots from 5 on
    some = np.array([1, 3])
    segments = visibility.segments(row, some, None, 0, 5, n, CPU)
    assert seen(segments, 2, 5 + n) == [[5 + key for key in expected[query]] for query in some]
    # some keys, with gaps
    read = np.array([0, 1, 3])
    segments = visibility.segments(row, some, read, 0, 0, n, CPU)
    assert seen(segments, 2, n) == [[k for k in expected[query] if k in read] for query in some]


def test_long_rows_are_masked_in_pieces() -> None:
    row = canvas("x" * 1500 + "." * 20)
    segments = Visibility(decided_first=True).segments(
        row, np.arange(1520), None, 0, 0, 1520, CPU
    )  # fmt: skip
    assert [segment.queries.stop for segment in segments] == [512, 1024, 1520]
    assert [segment.mask.shape for segment in segments if segment.mask is not None] == [
        (512, 512), (512, 1024), (496, 1520),
    ]  # fmt: skip
    assert seen(segments, 1520, 1520)[700] == list(range(701))


def test_shadow_tokens_see_what_masks_see_but_their_own_position() -> None:
    shadow = np.array([1, 2])
    decided_first = Visibility(decided_first=True)
    for visibility, expected in (
        (Visibility(), [[0, 2, 3, 4, 5], [0, 1, 3, 4, 5]]),
        (Visibility(2), [[0, 4], [0, 1, 3, 4, 5]]),
        (decided_first, [[0, 2, 4], [0, 1, 4, 5]]),
    ):
        segment = visibility.shadow(canvas("xxx."), slice(0, 4), shadow, CPU)
        assert seen([segment], 6, 6)[4:] == expected
