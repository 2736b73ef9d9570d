"""Many rows, each with its own plan, as one packed forward.

A `Packing` takes what rows feed, one after the other, and becomes a `Packed` forward.  `pack` fills
one with the jobs of a step; verifiers (`dllm.drafting.verifiers`) with texts and drafts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.canvas import PROPOSAL, PURPOSES, Canvas, FloatArray, IntArray
from ..kernels.transfer import upload
from ..models.forwards import CACHE
from ..models.segments import Segment
from .kv import KVBuffer, Scratch
from .rows import Job, Layout
from .visibility import Piece, Visibility

BIDIRECTIONAL = Visibility()


@dataclass(slots=True)
class Packed:
    """A packed forward.  ``ids``, ``positions`` (1, Q) int64; ``slots`` (Q,) int64 or None;
    ``scored`` (R,) int64 indexes the packed rows that meet the head, row by row; ``lanes``: the
    lanes of all jobs in packed order; ``guided``, where some rows are: which of these (n,), the
    packed rows of their second lanes (n,), int64 both, and how strongly (n, 1) float32."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor | None
    segments: list[Segment]
    scored: torch.Tensor
    lanes: list[tuple[Job, int]] = field(default_factory=list)
    guided: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    sliding: list[Segment] | None = None  # as `segments`, for layers with a window
    starts: list[int] = field(default_factory=list)  # where each job begins on the packed axis
    layouts: list[Layout] | None = None  # what its jobs feed, where the next step may feed the same
    moved: list[int] = field(default_factory=list)
    further: list[torch.Tensor] = field(default_factory=list)  # what else went up with it

    def inputs(self, buffer: KVBuffer | None) -> dict[str, Any]:
        """Arguments of a network of transformers, whose keys and values go to ``buffer``."""
        if buffer is None:
            buffer = Scratch(self.ids.shape[1], self.ids.device)
        else:
            buffer.slots = self.slots
        # An attention mask that is 4-D already: transformers then builds none of its own.
        no_mask = _no_mask(self.ids.device)
        inputs = {
            "input_ids": self.ids, "position_ids": self.positions, "attention_mask": no_mask,
            CACHE: buffer, "use_cache": False, "segments": self.segments,
        }  # fmt: skip
        if self.sliding is not None:
            inputs["sliding"] = self.sliding
        return inputs


@dataclass(slots=True)
class Packing:
    """Rows of one forward, laid end to end; ``size`` queries so far."""

    size: int = 0
    ids: list[IntArray] = field(default_factory=list)
    positions: list[IntArray] = field(default_factory=list)
    slots: list[IntArray] = field(default_factory=list)
    scored: list[IntArray] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    sliding: list[Piece] = field(default_factory=list)

    def feed(self, ids: IntArray, positions: IntArray, slots: IntArray | None = None) -> int:
        """Append the queries of a row (n,): tokens, position ids, and the slots that take their
        keys and values; where they begin on the packed axis.  What they attend to goes to
        ``pieces``, which of them are scored to ``scored``, in packed queries both."""
        at = self.size
        self.ids.append(ids)
        self.positions.append(positions)
        if slots is not None:
            self.slots.append(slots)
        self.size += len(ids)
        return at

    def packed(
        self, device: torch.device, waste: int = 0, slots: int | None = None,
        further: Sequence[NDArray[Any]] = (),
    ) -> Packed:  # fmt: skip
        """The forward.  ``waste``, ``slots``: see `grouped`; ``further``: `Packed.further`."""
        kept = [_join(parts) for parts in (self.ids, self.positions, self.scored)]
        own = [_join(self.slots)] if self.slots else []
        segments = _segment_each(self.pieces) if not waste else None
        runs = _runs(self.pieces, waste, slots) if segments is None else []
        sliding = _runs(self.sliding)
        layout = [array for run in (*runs, *sliding) for array in run.arrays]
        up = upload([*kept, *own, *further, *layout], device)
        there = iter(up[len(kept) + len(own) + len(further) :])
        return Packed(
            up[0][None], up[1][None], up[3] if own else None,
            [run.segment(there) for run in runs] if segments is None else segments, up[2],
            sliding=[run.segment(there) for run in sliding] or None,
            further=up[len(kept) + len(own) :][: len(further)],
        )  # fmt: skip


def pack(
    jobs: Sequence[Job], shift: int, stored: bool, device: torch.device,
    visibility: Visibility = BIDIRECTIONAL, last: Packed | None = None, uniform: int = 0,
    further: Sequence[NDArray[Any]] = (), scoring: Sequence[int] | None = None,
) -> Packed:  # fmt: skip
    """Lay the jobs' computed positions end to end, all first lanes before the second ones.

    ``uniform``: undecided positions are fed as random ids below it, instead of a mask.

    ``last``: the forward before, whose layout is taken over where all rows feed what they fed.
    ``shift``: target t is scored by row t - shift.  ``stored``: keys are read from the buffer and
    not from this forward.  ``further``: arrays that go up in the same copy.  ``scoring``: the
    jobs in the order of their scored rows, by default as they are.
    """
    known: list[Any] = [job.layout for job in jobs]
    if last is not None and last.layouts == known:
        return _same(last, jobs, shift, device, uniform, further, scoring)
    order = [(job, 0) for job in jobs]
    if any(job.row.recipe.config.cfg_scale for job in jobs):
        order += [(job, 1) for job in jobs if job.lanes > 1]
    packing, second, starts = Packing(), list[IntArray](), list[int]()
    ids, positions, slots, scored = packing.ids, packing.positions, packing.slots, packing.scored
    moved, pieces = list[int](), packing.pieces
    begun = list[int]()  # where the scored rows of each job begin among the parts
    for job, lane in order:
        layout = job.layout
        if layout is None or lane:
            layout = _layout(job, lane, stored, visibility)
            if not lane and not job.ordered[1] and not visibility.causal:
                job.layout = layout
        at, canvas = packing.size, job.canvas
        # The second lane of a guided row has its given text masked.
        tokens = np.where(canvas.given, canvas.mask_id, canvas.tokens) if lane else canvas.tokens
        ids.append(fed(canvas, tokens, layout, uniform))
        positions.append(layout.positions)
        if stored and layout.slots is not None:
            slots.append(layout.slots)
        packing.size += layout.count
        base = 0 if stored else at
        pieces += [piece.moved(at, base) for piece in layout.pieces]
        packing.sliding += (piece.moved(at, base) for piece in layout.sliding)
        asked = job.plan.rows(job.targets, shift)
        if lane:
            second.append(np.searchsorted(layout.positions, asked) + at)
            continue
        starts.append(at)
        begun.append(len(scored))
        # The rows of a run of positions are found for all jobs at once.
        scored.append(asked if layout.first >= 0 else np.searchsorted(layout.positions, asked))
        moved.append(at - max(layout.first, 0))
        if job.masks.size:
            again, length = job.masks, canvas.length
            read = job.plan.read if stored else layout.positions
            read = np.arange(length) if read is None else read
            own = again + job.row.lane(job.row.lanes - 1) if stored else None
            behind = packing.feed(np.full(len(again), canvas.mask_id), again, own)
            first = job.base(0) if stored else at
            keys = slice(at, packing.size) if own is None else np.concatenate([read + first, own])
            hidden = visibility.of_masks(canvas, again, read, job.ordered)
            pieces.append(Piece(behind, len(again), keys, hidden))
            scored.append(behind + np.arange(len(again)))
            moved.append(0)
    if scoring is not None:
        ends = [*begun[1:], len(scored)]
        parts = [part for i in scoring for part in range(begun[i], ends[i])]
        scored, moved = [scored[part] for part in parts], [moved[part] for part in parts]
    if len(scored) > 1:
        counts = [len(part) for part in scored]
        packing.scored = [np.concatenate(scored) + np.repeat(moved, counts)]
    elif scored:
        packing.scored = [scored[0] + moved[0]]
    guides = _guided(jobs, second, scoring) if second else ()
    packed = packing.packed(device, further=[*further, *guides])
    packed.lanes, packed.starts = order, starts
    if second:
        *packed.further, which, rows, scale = packed.further
        packed.guided = which, rows, scale
    if all(job.layout is not None and not job.masks.size and job.lanes == 1 for job in jobs):
        packed.layouts, packed.moved = [job.layout for job in jobs if job.layout is not None], moved
    return packed


def fed(canvas: Canvas, tokens: IntArray, layout: Layout, uniform: int) -> IntArray:
    """The ids that a row feeds: its ``tokens``, at undecided positions the mask id or what its
    sampler holds there; with ``uniform`` noise `Canvas.fed_ids`."""
    return canvas.fed_ids(layout.positions, uniform) if uniform else tokens[layout.where]


def _same(
    last: Packed, jobs: Sequence[Job], shift: int, device: torch.device, uniform: int,
    further: Sequence[NDArray[Any]], scoring: Sequence[int] | None,
) -> Packed:  # fmt: skip
    """Another step over the positions of the last one: its tokens, and what is scored of it."""
    layouts = last.layouts or []
    ids = [
        fed(job.canvas, job.canvas.tokens, one, uniform)
        for job, one in zip(jobs, layouts, strict=True)
    ]
    rows = [job.plan.rows(job.targets, shift) for job in jobs]
    where = [
        at if layout.first >= 0 else np.searchsorted(layout.positions, at)
        for layout, at in zip(layouts, rows, strict=True)
    ]
    if scoring is not None:
        where = [where[i] for i in scoring]
    if len(jobs) > 1:
        scored = np.concatenate(where) + np.repeat(last.moved, [len(at) for at in where])
    else:
        scored = where[0] + last.moved[0]
    fed_ids = _join(ids).reshape(1, -1)
    last.ids, last.scored, *last.further = upload([fed_ids, scored, *further], device)
    return last


def _layout(job: Job, lane: int, stored: bool, visibility: Visibility) -> Layout:
    """What a job's lane feeds, its keys in slots if ``stored``, else from its first query on."""
    compute, canvas = job.plan.compute, job.canvas
    count, first = len(compute), int(compute[0])
    run = count == int(compute[-1]) - first + 1
    where = slice(first, first + count) if run else compute
    visibility = visibility.bound(canvas, job.opening)
    base, length = (job.base(lane), canvas.length) if stored else (0, count)
    sliding, pieces, begin = list[Piece](), list[Piece](), 0
    if visibility.window is not None:
        sliding += visibility.pieces(
            compute, job.plan.read if stored else None, 0, base, length, canvas.masked, sliding=True
        )
    for piece, read in job.plan.pieces(length) if stored else [(compute, None)]:
        pieces += visibility.pieces(
            piece, read, begin, base, length, canvas.masked, ordered=job.ordered
        )
        begin += len(piece)
    slots = compute + base if stored else None
    open_ = int(np.searchsorted(compute, visibility.open)) if visibility.prefix else 0
    return Layout(where, count, first if run else -1, compute, slots, pieces, sliding, open_)


def _guided(
    jobs: Sequence[Job], second: list[IntArray], scoring: Sequence[int] | None
) -> tuple[IntArray, IntArray, FloatArray]:
    """`Packed.guided`: a guided job has targets only, and feeds nothing again."""
    at, which, scales, rows = 0, [], [], list[IntArray]()
    theirs = iter(second)
    lanes = [next(theirs) if job.lanes > 1 else None for job in jobs]
    for i in range(len(jobs)) if scoring is None else scoring:
        job, own = jobs[i], lanes[i]
        count = len(job.asked)
        if own is not None:
            which.append(np.arange(at, at + count))
            scales.append(np.full((count, 1), job.row.recipe.config.cfg_scale, np.float32))
            rows.append(own)
        at += count
    return _join(which), _join(rows), np.concatenate(scales)


@lru_cache(maxsize=16)
def _no_mask(device: torch.device) -> torch.Tensor:
    return torch.empty(1, 1, 1, 1, device=device)


def _join(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@dataclass(slots=True)
class _Run:
    """Pieces of as many queries each, at equal distances, that one call attends: ``longest`` and
    ``total`` of their numbers of keys."""

    pieces: list[Piece]
    longest: int
    total: int
    stride: int = 0

    @classmethod
    def of(cls, piece: Piece) -> Self:
        count = _count(piece)
        return cls([piece], count, count)

    def join(self, piece: Piece, waste: int, slots: int | None) -> bool:
        """Take ``piece`` in if it can be attended in the same call."""
        last, rows, keys = self.pieces[-1], len(self.pieces) + 1, _count(piece)
        if (
            not isinstance(piece.keys, slice)
            or not isinstance(last.keys, slice)
            or last.count != piece.count
            or last.first + last.count != piece.first
        ):
            return False
        stride, longest = piece.keys.start - last.keys.start, max(self.longest, keys)
        if stride < longest or self.stride not in (0, stride):
            return False
        beyond = slots is not None and piece.keys.start + longest > slots
        if beyond or rows * longest - self.total - keys > waste * rows:
            return False
        self.pieces.append(piece)
        self.longest, self.stride, self.total = longest, stride, self.total + keys
        return True

    @property
    def masked(self) -> bool:
        """Whether some query does not see all of its keys."""
        padded = self.total < len(self.pieces) * self.longest
        return padded or any(piece.hidden is not None for piece in self.pieces)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """What `segment` needs on the device: which keys are hidden, and where they lie."""
        first, result = self.pieces[0], list[NDArray[Any]]()
        if self.masked:
            hidden = np.ones((len(self.pieces), first.count, self.longest), np.bool_)
            for row, piece in zip(hidden, self.pieces, strict=True):
                row[:, : _count(piece)] = False if piece.hidden is None else piece.hidden
            result.append(hidden)
        return result if isinstance(first.keys, slice) else [*result, first.keys]

    def segment(self, there: Iterator[torch.Tensor]) -> Segment:
        """The segment, given the `arrays` of all runs on the device, one after the other."""
        first, rows, longest = self.pieces[0], len(self.pieces), self.longest
        queries = slice(first.first, first.first + rows * first.count)
        mask = None
        if self.masked:
            hidden = next(there)
            mask = torch.zeros(hidden.shape, device=hidden.device)
            mask.masked_fill_(hidden, -torch.inf)
        if not isinstance(first.keys, slice):
            return Segment(queries, next(there), mask=mask)
        start = first.keys.start
        return Segment(queries, slice(start, start + longest), rows, self.stride, mask)


def _count(piece: Piece) -> int:
    """How many keys it attends to."""
    keys = piece.keys
    return keys.stop - keys.start if isinstance(keys, slice) else len(keys)


def _segment_each(pieces: Sequence[Piece]) -> list[Segment] | None:
    """A segment per piece, where none has anything hidden or could share a call with the one before
    it, as those of rows of different lengths."""
    before = None
    segments = []
    for piece in pieces:
        keys, count = piece.keys, piece.count
        if piece.hidden is not None or type(keys) is not slice:
            return None
        length = keys.stop - keys.start
        if before == (count, length):
            return None
        before = count, length
        segments.append(Segment(slice(piece.first, piece.first + count), keys))
    return segments


def grouped(
    pieces: Iterable[Piece], device: torch.device, waste: int = 0, slots: int | None = None
) -> list[Segment]:
    """Pieces as segments: neighbours of as many queries, at equal distances, as one.

    ``waste``: how many keys per piece may be computed and masked, to save a call; those must
    lie within the first ``slots``.  Without it only pieces of as many keys are joined.
    """
    runs = _runs(pieces, waste, slots)
    there = iter(upload([array for run in runs for array in run.arrays], device))
    return [run.segment(there) for run in runs]


def _runs(pieces: Iterable[Piece], waste: int = 0, slots: int | None = None) -> list[_Run]:
    runs: list[_Run] = []
    for piece in pieces:
        if not runs or not runs[-1].join(piece, waste, slots):
            runs.append(_Run.of(piece))
    return runs


def noise_keys(jobs: Sequence[Job]) -> IntArray:
    """(R, 4) int64: seed, stream, position, step of every scored row, for keyed proposals."""
    parts = []
    for job in jobs:
        canvas = job.canvas
        keys = np.empty((len(job.asked), 4), np.int64)
        keys[:, 0] = job.row.recipe.config.seed
        keys[:, 1] = canvas.row * PURPOSES + PROPOSAL
        keys[:, 2] = job.asked
        keys[:, 3] = canvas.step
        parts.append(keys)
    return np.concatenate(parts)
