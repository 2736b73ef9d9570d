"""Which positions of a row attend to which: one rule for packing, layers and masks fed again.

Every position has a rank, and a query sees the keys whose rank is not above its own:

| attention | rank of a position |
|---|---|
| bidirectional | the same for all |
| block-causal | the number of its block |
| causal | its position, undecided ones behind all others |
| causal prefix | its position before the open block, else the last one of its block |

Some positions may be ranked one by one where a sampler asks for it (S2D2): each of them sees what
is left of it, as if blocks had one position there.

The last row is that of autoregressive models, and of WeDLM (arXiv 2512.22737), which reorders the
text so that decided tokens come first and masks last, both ascending and with the position ids of
the text.  Nothing is moved for it: keys stay in the order of the text, and what a query does not
see is masked.  Behind a causal text may stand a tree, whose nodes see it and their ancestors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Self

import numpy as np

from ..core.canvas import BoolArray, Canvas, IntArray
from ..models import Facts

MASKS_BEHIND = 1 << 32  # what being undecided adds to a rank: more than any position
CHUNK = 512  # queries that one mask covers

Range = tuple[int, int]  # positions from the first on, below the second
NO_RANGE: Range = (0, 0)


@dataclass(slots=True)
class Piece:
    """``count`` queries of one row, from ``first`` on, on the packed axis, and the ``keys`` they
    attend to: a range of slots, or slots (m,) int64; but for ``hidden`` ones (count, m)."""

    first: int
    count: int
    keys: slice | IntArray
    hidden: BoolArray | None = None

    def moved(self, queries: int, keys: int) -> Self:
        """The same so much further on both axes."""
        at = self.keys
        if keys:
            at = slice(at.start + keys, at.stop + keys) if isinstance(at, slice) else at + keys
        return type(self)(self.first + queries, self.count, at, self.hidden)


@dataclass(frozen=True, slots=True)
class Visibility:
    """``block_length`` of block-causal attention, counted from position ``origin``; or ``causal``;
    bidirectional with neither.  ``prefix``: what stands before position ``open`` is causal.
    ``window``: in some layers it is seen so many positions back only, each from its own place, a
    block from its first."""

    block_length: int | None = None
    causal: bool = False
    prefix: bool = False
    window: int | None = None
    origin: int = 0
    open: int = 0

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, facts: Facts) -> Self:
        return cls(
            facts.block_length, facts.mask_kind in ("causal", "decided_first"),
            facts.mask_kind == "causal_prefix", facts.sliding_window,
        )  # fmt: skip

    def bound(self, canvas: Canvas, opening: int | None = None) -> Self:
        """The same for a row: where its blocks are counted from, and which is open, by default that
        of its window."""
        if not self.prefix:
            return self
        assert self.block_length is not None
        if opening is None:
            opening, _ = canvas.block_at(canvas.window[0], self.block_length)
        return replace(self, origin=canvas.block_at(0, self.block_length)[0], open=opening)

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return self.block_length is None and not self.causal

    def rank(
        self, positions: IntArray, undecided: BoolArray | bool, ordered: Range = NO_RANGE
    ) -> IntArray:
        """(n,) int64; the positions ``ordered`` are ranked one by one."""
        if self.causal:
            return positions + MASKS_BEHIND * undecided
        low, high = ordered
        if self.block_length is not None:
            size, origin = self.block_length, self.origin
            low = (low - origin) // size * size + origin  # in a block all or none to the left
            result = ((positions - origin) // size + 1) * size + origin - 1
            if self.prefix:
                result = np.where(positions < self.open, positions, result)
        else:
            result = np.where(positions < low, low - 1, MASKS_BEHIND)
        return np.where((positions >= low) & (positions < high), positions, result)

    def unseen(self, canvas: Canvas, queries: IntArray, keys: IntArray) -> BoolArray:
        """(n, m) bool: which of the positions ``keys`` the positions ``queries`` do not see."""
        self = self.bound(canvas)
        ranks = self.rank(keys, canvas.masked[keys])
        return ranks > self.rank(queries, canvas.masked[queries])[:, None]

    def pieces(
        self, compute: IntArray, read: IntArray | None, at: int, base: int, length: int,
        masked: BoolArray | None = None, tree: BoolArray | None = None, ordered: Range = NO_RANGE,
        sliding: bool = False,
    ) -> Iterator[Piece]:  # fmt: skip
        """What a row's queries ``compute`` attend to, which begin at ``at`` on the packed axis and
        whose keys lie in the slots from ``base``: those of ``read``, or the first ``length``.

        ``masked`` (N,): which positions are undecided (None: none).  ``tree`` (n, n): the last n
        of ``length`` are nodes, and node i sees node j where ``tree[i, j]``.  ``ordered``:
        positions that are ranked one by one.  ``sliding``: as in layers with a window.
        """
        if self.full and ordered == NO_RANGE:
            keys = slice(base, base + length) if read is None else _slots(read, base)
            yield Piece(at, len(compute), keys)
            return
        if self.causal and masked is None and read is None and tree is None:
            for first, last in self._runs(compute):  # the usual case of autoregressive texts
                run = compute[first:last]
                keys = slice(base, base + int(run[-1]) + 1)
                hidden = np.arange(run[-1] + 1) > run[:, None] if last - first > 1 else None
                yield Piece(at + first, last - first, keys, hidden)
            return
        read = np.arange(length) if read is None else read
        ranks = self.rank(read, False if masked is None else masked[read], ordered)
        own = self.rank(compute, False if masked is None else masked[compute], ordered)
        floor = self._floor(compute) if sliding else None
        for first, last in self._runs(own):
            run = own[first:last]
            seen = ranks <= run.max()
            if floor is not None:
                seen &= read >= floor[first]
            hidden = ranks[seen] > run[:, None] if run[0] != run[-1] or tree is not None else None
            if floor is not None and hidden is not None:
                hidden |= read[seen] < floor[first:last, None]
            if tree is not None and hidden is not None:
                begin = length - len(tree)
                nodes, keys = compute[first:last] >= begin, read[seen] >= begin
                some = np.ix_(compute[first:last][nodes] - begin, read[seen][keys] - begin)
                hidden[np.ix_(nodes, keys)] = ~tree[some]
            yield Piece(at + first, last - first, _slots(read[seen], base), hidden)

    def _floor(self, positions: IntArray) -> IntArray:
        """(n,) the first position that each of them sees in layers with a window."""
        assert self.window is not None and self.block_length is not None
        low = (positions - self.origin) // self.block_length * self.block_length + self.origin
        return np.where(positions < self.open, positions, low) - self.window + 1

    def _runs(self, ranks: IntArray) -> Iterator[tuple[int, int]]:
        """Queries that are attended in one call: those of a block, or some that share a mask."""
        count = len(ranks)
        if self.prefix:
            causal = int(np.searchsorted(ranks, self.open))
            yield from pairwise([*range(0, causal, CHUNK), causal])
            blocks = (ranks[causal:] - self.origin) // (self.block_length or 1)
            cuts = (np.flatnonzero(np.diff(blocks)) + 1 + causal).tolist()
            yield from pairwise([causal, *cuts, count] if count > causal else [])
            return
        if self.block_length is None:
            yield from pairwise([*range(0, count, CHUNK), count])
            return
        blocks = ranks // self.block_length
        yield from pairwise([0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), count])

    def of_masks(
        self, canvas: Canvas, again: IntArray, keys: IntArray, ordered: Range
    ) -> BoolArray:
        """(n, m + n) bool: which of the positions ``keys`` (m,) and of one another masks fed again
        do not see, [MASK]s at the positions ``again`` (n,): they see what masks there would, but
        for the token at their own position, and none of the others."""
        self = self.bound(canvas)
        own = self.rank(again, True, ordered)
        ranks = self.rank(keys, canvas.masked[keys], ordered)
        hidden = (ranks > own[:, None]) | (keys == again[:, None])
        return np.concatenate([hidden, ~np.eye(len(own), dtype=np.bool_)], 1)


def _slots(positions: IntArray, base: int) -> slice | IntArray:
    """The slots of ascending positions: a range, which is a view of the buffer, where it can be."""
    first, last = int(positions[0]), int(positions[-1])
    if len(positions) == last - first + 1:
        return slice(base + first, base + last + 1)
    return positions + base
