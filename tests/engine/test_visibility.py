"""Who sees whom, against tables."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from dllm.core.canvas import Canvas
from dllm.engine.packing import grouped
from dllm.engine.visibility import Piece, Visibility

CPU = torch.device("cpu")


def canvas(text: str) -> Canvas:
    """``x`` is decided, ``.`` is not."""
    masked = np.array([letter == "." for letter in text])
    tokens = np.where(masked, 9, 1)
    return Canvas(tokens, masked, 0, 0, len(text), mask_id=9, pad_id=0)


def seen(pieces: Iterable[Piece], queries: int, keys: int) -> list[list[int]]:
    """Slots that each query reads."""
    result: list[Any] = [None] * queries
    for segment in grouped(pieces, CPU):
        at = segment.keys
        slots = np.arange(keys)[at] if isinstance(at, slice) else at.numpy()
        for i, query in enumerate(range(queries)[segment.queries]):
            open_ = slice(None) if segment.mask is None else segment.mask[0, i].numpy() == 0
            assert result[query] is None
            result[query] = slots[open_].tolist()
    return result


TABLE = [
    (Visibility(), "x.x.", [[0, 1, 2, 3]] * 4),
    (Visibility(2), "x.x.", [[0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]),
    (Visibility(causal=True), "xxxx", [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]),
    (Visibility(causal=True), "x.x.", [[0], [0, 1, 2], [0, 2], [0, 1, 2, 3]]),
    (Visibility(causal=True), "..xx", [[0, 2, 3], [0, 1, 2, 3], [2], [2, 3]]),
]


@pytest.mark.parametrize(("visibility", "text", "expected"), TABLE)
def test_what_every_position_sees(
    visibility: Visibility, text: str, expected: list[list[int]]
) -> None:
    row, n = canvas(text), len(text)
    everything = np.arange(n)
    masked = row.masked
    assert seen(visibility.pieces(everything, None, 0, 0, n, masked), n, n) == expected
    hidden = visibility.unseen(row, everything, everything)
    assert [np.flatnonzero(~h).tolist() for h in hidden] == expected
    # some queries, keys in slots from 5 on
    some = np.array([1, 3])
    pieces = visibility.pieces(some, None, 0, 5, n, masked)
    assert seen(pieces, 2, 5 + n) == [[5 + key for key in expected[query]] for query in some]
    # some keys, with gaps
    read = np.array([0, 1, 3])
    pieces = visibility.pieces(some, read, 0, 0, n, masked)
    assert seen(pieces, 2, n) == [[k for k in expected[query] if k in read] for query in some]


def test_long_rows_are_masked_in_pieces() -> None:
    row = canvas("x" * 1500 + "." * 20)
    causal = Visibility(causal=True)
    pieces = list(causal.pieces(np.arange(1520), None, 0, 0, 1520, row.masked))
    assert [piece.first + piece.count for piece in pieces] == [512, 1024, 1520]
    assert [piece.hidden.shape for piece in pieces if piece.hidden is not None] == [
        (512, 512), (512, 1024), (496, 1520),
    ]  # fmt: skip
    assert seen(pieces, 1520, 1520)[700] == list(range(701))


def test_a_causal_query_reads_the_slots_that_are_named() -> None:
    pieces = Visibility(causal=True).pieces(np.array([3]), np.array([0, 2, 3]), 0, 5, 4)
    assert seen(pieces, 1, 9) == [[5, 7, 8]]


def test_positions_that_are_ranked_one_by_one() -> None:
    """S2D2: drafts see what is left of them, and the masks that judge them only themselves besides.
    Blocks are counted whole: the decided text of the first is ranked, too."""
    blocks, everything = Visibility(2), np.arange(6)
    row = canvas("xxx...")
    for visibility, ordered, expected in (
        (blocks, (2, 4), [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3], [*range(6)], [*range(6)]]),
        (blocks, (0, 3), [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [*range(6)], [*range(6)]]),
        (Visibility(), (2, 4), [[0, 1], [0, 1], [0, 1, 2], [0, 1, 2, 3], *[[*range(6)]] * 2]),
    ):
        pieces = visibility.pieces(everything, None, 0, 0, 6, row.masked, ordered=ordered)
        assert seen(pieces, 6, 6) == expected
    hidden = blocks.of_masks(row, np.array([2, 3]), everything[:4], (3, 4))
    assert [np.flatnonzero(~h).tolist() for h in hidden] == [[0, 1, 4], [0, 1, 2, 5]]


def test_nodes_of_a_tree_see_the_text_and_their_ancestors() -> None:
    """A text of four tokens, of which two are fed, and a tree: 4 - 5, 4 - 6 - 7."""
    tree = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], np.bool_)
    pieces = Visibility(causal=True).pieces(np.arange(2, 8), None, 0, 10, 8, tree=tree)
    text = [10, 11, 12, 13]
    assert seen(pieces, 6, 20) == [
        text[:3], text, [*text, 14], [*text, 14, 15], [*text, 14, 16], [*text, 14, 16, 17],
    ]  # fmt: skip


def test_what_is_joined_stays_what_it_is() -> None:
    """Rows of different lengths in one call, where that wastes little; never beyond the pool."""
    causal, lengths, bases = Visibility(causal=True), (7, 9, 8), (0, 20, 40)
    pieces = [
        piece
        for i, (length, base) in enumerate(zip(lengths, bases, strict=True))
        for piece in causal.pieces(np.arange(length - 2, length), None, 2 * i, base, length)
    ]
    expected = [list(range(b, b + n - 1 + i)) for n, b in zip(lengths, bases, strict=True)
                for i in (0, 1)]  # fmt: skip
    sizes = [(0, None, 3), (1, None, 1), (1, 49, 1), (1, 48, 2)]
    for waste, slots, calls in sizes:
        segments = grouped(pieces, CPU, waste, slots)
        assert len(segments) == calls
        for segment in segments:
            n, keys = 2, segment.keys
            assert segment.mask is not None and isinstance(keys, slice)
            for row in range(segment.rows):
                for i in range(n):
                    open_ = np.flatnonzero(segment.mask[row, i].numpy() == 0)
                    query = segment.queries.start + row * n + i
                    found = open_ + keys.start + row * segment.key_stride
                    assert found.tolist() == expected[query]
            if slots is not None:
                assert keys.stop + (segment.rows - 1) * segment.key_stride <= slots
