"""Which positions of a row attend to which: one rule for packing, layers, maps and shadow tokens.

Every position has a rank, and a query sees the keys whose rank is not above its own:

| attention | rank of a position |
|---|---|
| bidirectional | the same for all |
| block-causal | the number of its block |
| decided first | its place in the order of decided tokens, then masks |

The last is that of WeDLM (arXiv 2512.22737): causal attention over a reordered text, decided tokens
in front, masks at the end, both ascending and with the position ids of the text.  Nothing is moved
for it: keys stay in the order of the text, and what a query does not see is masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from ..canvas import BoolArray, Canvas, IntArray
from ..models import Facts
from ..models.attention import Segment

MASKS_BEHIND = 1 << 32  # what being undecided adds to a rank: more than any position
CHUNK = 512  # queries that one mask covers


@dataclass(frozen=True, slots=True)
class Visibility:
    """``block_length`` of block-causal attention, counted from position 0; or ``decided_first``;
    bidirectional with neither."""

    block_length: int | None = None
    decided_first: bool = False

    @classmethod
    def of(cls, facts: Facts) -> Visibility:
        return cls(facts.block_length, facts.mask_kind == "decided_first")

    @property
    def full(self) -> bool:
        """Whether every query sees every key."""
        return self.block_length is None and not self.decided_first

    def rank(self, positions: IntArray, undecided: BoolArray | bool) -> IntArray:
        """(n,) int64."""
        if self.block_length is not None:
            return positions // self.block_length
        if self.decided_first:
            return positions + MASKS_BEHIND * undecided
        return np.zeros_like(positions)

    def unseen(self, canvas: Canvas, queries: IntArray, keys: IntArray) -> BoolArray:
        """(n, m) bool: which of the positions ``keys`` the positions ``queries`` do not see."""
        ranks = self.rank(keys, canvas.masked[keys])
        result: BoolArray = ranks > self.rank(queries, canvas.masked[queries])[:, None]
        return result

    def segments(
        self, canvas: Canvas, compute: IntArray, read: IntArray | None, at: int, base: int,
        length: int, device: torch.device,
    ) -> list[Segment]:  # fmt: skip
        """The segments of a row whose queries ``compute`` begin at ``at`` on the packed axis and
        whose keys lie in the slots from ``base``: those of ``read``, or the first ``length``."""
        if self.full:
            keys = slice(base, base + length) if read is None else _slots(read, base, device)
            return [Segment(slice(at, at + len(compute)), keys)]
        read = np.arange(length) if read is None else read
        ranks = self.rank(read, canvas.masked[read])
        own = self.rank(compute, canvas.masked[compute])
        result = []
        for first, last in self._runs(own):
            run = own[first:last]
            seen = ranks <= run.max()
            mask = None
            if run[0] != run[-1]:
                mask = _additive(ranks[seen] > run[:, None], device)
            keys = _slots(read[seen], base, device)
            result.append(Segment(slice(at + first, at + last), keys, mask=mask))
        return result

    def _runs(self, ranks: IntArray) -> Iterator[tuple[int, int]]:
        """Queries that are attended in one call: those of a block, or some that share a mask."""
        count = len(ranks)
        if self.decided_first:
            return pairwise([*range(0, count, CHUNK), count])
        return pairwise([0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), count])

    def shadow(self, canvas: Canvas, row: slice, shadow: IntArray, device: torch.device) -> Segment:
        """Shadow tokens, [MASK]s at the positions ``shadow`` that stand behind their ``row`` on
        the packed axis: they see what masks there would, but for the token at their own position,
        and one another."""
        length, count = row.stop - row.start, len(shadow)
        keys = np.arange(length)
        own = self.rank(shadow, True)
        ranks = np.concatenate([self.rank(keys, canvas.masked[:length]), own])
        hidden = ranks > own[:, None]
        hidden[np.arange(count), shadow] = True
        return Segment(
            slice(row.stop, row.stop + count), slice(row.start, row.stop + count),
            mask=_additive(hidden, device),
        )  # fmt: skip


def _additive(hidden: BoolArray, device: torch.device) -> torch.Tensor:
    """(n, m) float32 to be added to scores: -inf where ``hidden``."""
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(device)


def _slots(positions: IntArray, base: int, device: torch.device) -> slice | torch.Tensor:
    """The slots of ascending positions: a range, which is a view of the buffer, where it can be."""
    first, last = int(positions[0]), int(positions[-1])
    if len(positions) == last - first + 1:
        return slice(base + first, base + last + 1)
    return tensor(positions + base, device)


def tensor(array: IntArray, device: torch.device) -> torch.Tensor:
    """``array`` on ``device``; no copy on CPU."""
    result = torch.from_numpy(np.ascontiguousarray(array))
    return result if device.type == "cpu" else result.to(device, non_blocking=True)
