"""Many rows, each with its own plan, as one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch

from ..cache import Plan, Slots
from ..canvas import PROPOSAL, PURPOSES, Canvas, IntArray
from ..models.attention import Segment
from ..samplers import NOTHING, Trial


@dataclass(slots=True)
class Row:
    """A canvas in the engine: the freshness of its slots, the first of them in the buffer, the
    branches its next forward feeds, and what is kept of its last distributions.

    A guided row has two lanes: as it is, and with the given text masked.  Branches have lanes of
    their own, which hold the same keys and values between steps.
    """

    canvas: Canvas
    slots: Slots
    base: int = 0
    trials: tuple[Trial, ...] = ()
    previous: tuple[IntArray, torch.Tensor] | None = None

    def lane(self, number: int) -> int:
        """The first slot of one of its lanes in the buffer."""
        return self.base + number * len(self.slots.age)

    def branches(self) -> list[Canvas]:
        """The canvases to feed: the row itself, or a copy per trial."""
        if not self.trials:
            return [self.canvas]
        result = []
        for trial in self.trials:
            branch = self.canvas.fork()
            branch.commit(trial.positions, trial.tokens, trial.logprobs)
            result.append(branch)
        return result


@dataclass(slots=True)
class Job:
    """What one branch of one row wants of this step.  ``lane``: the first of the row's lanes that
    hold its keys and values.  ``shadow``: positions that are fed once more, as [MASK] tokens that
    see every token but the one at their own position."""

    row: Row
    canvas: Canvas
    plan: Plan
    targets: IntArray
    lane: int = 0
    lanes: int = 1
    shadow: IntArray = field(default_factory=lambda: NOTHING)
    logprobs: torch.Tensor | None = None  # (targets, V), where the sampler compares steps
    work: int | None = None  # positions computed per layer on average, where layers differ

    @property
    def size(self) -> int:
        """Token positions it feeds to the model."""
        return len(self.plan.compute) * self.lanes + len(self.shadow)

    @property
    def cost(self) -> int:
        """Token positions that the model computed for it."""
        return self.size if self.work is None else self.work

    @property
    def asked(self) -> IntArray:
        """Positions of the hidden rows that meet the head."""
        return np.concatenate([self.targets, self.shadow]) if self.shadow.size else self.targets

    def lane_tokens(self, lane: int) -> IntArray:
        """Token ids of a lane, (N,)."""
        canvas = self.canvas
        return canvas.tokens if lane == 0 else np.where(canvas.given, canvas.mask_id, canvas.tokens)

    def base(self, lane: int) -> int:
        """The first slot of one of its lanes in the buffer."""
        return self.row.lane(self.lane + lane)


@dataclass(slots=True)
class Packed:
    """A packed forward.  ``ids``, ``positions`` (1, Q) int64; ``slots`` (Q,) int64 or None;
    ``scored`` (lanes, R) int64 indexes the packed rows that meet the head."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor | None
    segments: list[Segment]
    scored: torch.Tensor


def pack(
    jobs: Sequence[Job], shift: int, stored: bool, device: torch.device,
    grid: int | None = None,
) -> Packed:  # fmt: skip
    """Lay the jobs' computed positions end to end.

    ``shift``: target t is scored by row t - shift.  ``stored``: keys are read from the buffer and
    not from this forward.  ``grid``: block length of block-causal attention.
    """
    lanes = jobs[0].lanes
    ids: list[IntArray] = []
    positions: list[IntArray] = []
    slots: list[IntArray] = []
    segments: list[Segment] = []
    scored: list[list[IntArray]] = [[] for _ in range(lanes)]
    at = 0
    for lane in range(lanes):
        for job in jobs:
            compute = job.plan.compute
            queries = slice(at, at + len(compute))
            ids.append(job.lane_tokens(lane)[compute])
            positions.append(compute)
            if stored:
                base = job.base(lane)
                slots.append(compute + base)
                segments += segments_of(
                    compute, job.plan.read, at, base, job.canvas.length, device, grid
                )
            else:
                segments += segments_of(compute, None, at, at, len(compute), device, grid)
            scored[lane].append(_indices(compute, np.maximum(job.targets - shift, 0)) + at)
            at += len(compute)
            if job.shadow.size:
                ids.append(np.full(len(job.shadow), job.canvas.mask_id))
                positions.append(job.shadow)
                segments.append(_shadow(queries, job.shadow, device, grid))
                scored[lane].append(at + np.arange(len(job.shadow)))
                at += len(job.shadow)
    return Packed(
        tensor(_join(ids), device)[None],
        tensor(_join(positions), device)[None],
        tensor(_join(slots), device) if slots else None,
        group(segments),
        tensor(np.stack([_join(part) for part in scored]), device),
    )


def _shadow(row: slice, shadow: IntArray, device: torch.device, grid: int | None) -> Segment:
    """Shadow tokens behind their row see the row but their own position, and one another; with a
    ``grid`` no later block."""
    length, count = row.stop - row.start, len(shadow)
    hidden = np.zeros((count, length + count), np.float32)
    hidden[np.arange(count), shadow] = -np.inf
    if grid is not None:
        blocks = np.concatenate([np.arange(length), shadow]) // grid
        hidden[blocks > shadow[:, None] // grid] = -np.inf
    keys = slice(row.start, row.stop + count)
    return Segment(
        slice(row.stop, row.stop + count), keys, mask=torch.from_numpy(hidden).to(device)
    )


def _join(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def tensor(array: IntArray, device: torch.device) -> torch.Tensor:
    """``array`` on ``device``; no copy on CPU."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _indices(compute: IntArray, rows: IntArray) -> IntArray:
    """Where ``rows`` stand in ``compute``; both ascending, rows contained in compute."""
    run = len(compute) == compute[-1] - compute[0] + 1
    result: IntArray = rows - compute[0] if run else np.searchsorted(compute, rows)
    return result


def segments_of(
    compute: IntArray, read: IntArray | None, at: int, base: int, length: int,
    device: torch.device, grid: int | None = None,
) -> list[Segment]:  # fmt: skip
    """The segments of a row whose queries ``compute`` begin at ``at`` on the packed axis and whose
    keys lie in the slots from ``base``: those of ``read``, or all ``length`` live ones.

    With a ``grid`` attention is block-causal: one segment per block of that length, counted from
    position 0, whose queries see their block and what is left of it.
    """
    if grid is None:
        keys = slice(base, base + length) if read is None else _keys(read, base, device)
        return [Segment(slice(at, at + len(compute)), keys)]
    result, blocks = [], compute // grid
    borders = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(compute)]
    for first, last in pairwise(borders):
        end = min(int(blocks[first] + 1) * grid, length)
        keys = slice(base, base + end) if read is None else _keys(read[read < end], base, device)
        result.append(Segment(slice(at + first, at + last), keys))
    return result


def _keys(read: IntArray, base: int, device: torch.device) -> slice | torch.Tensor:
    """The slots of ascending positions: a range, which is a view of the buffer, where it can be."""
    first, last = int(read[0]), int(read[-1])
    if len(read) == last - first + 1:
        return slice(base + first, base + last + 1)
    return tensor(read + base, device)


def group(segments: list[Segment]) -> list[Segment]:
    """Runs of equal segments at equal distances, each as one batched segment."""
    merged: list[Segment] = []
    for segment in segments:
        last = merged[-1] if merged else None
        grown = _append(last, segment) if last is not None else None
        if grown is None:
            merged.append(segment)
        else:
            merged[-1] = grown
    return merged


def _append(last: Segment, new: Segment) -> Segment | None:
    """``last`` with ``new`` as its next row, if sizes and distance allow it."""
    if not isinstance(last.keys, slice) or not isinstance(new.keys, slice):
        return None
    if last.mask is not None or new.mask is not None:
        return None
    queries = (last.queries.stop - last.queries.start) // last.rows
    stride = (new.keys.start - last.keys.start) // last.rows
    if (
        new.queries.stop - new.queries.start != queries
        or new.keys.stop - new.keys.start != last.keys.stop - last.keys.start
        or new.keys.start != last.keys.start + last.rows * stride
        or (last.rows > 1 and stride != last.key_stride)
        or stride < last.keys.stop - last.keys.start
    ):
        return None
    return Segment(slice(last.queries.start, new.queries.stop), last.keys, last.rows + 1, stride)


def noise_keys(jobs: Sequence[Job], seed: int) -> torch.Tensor:
    """(R, 4) int64: seed, stream, position, step of every scored row, for keyed proposals."""
    parts = []
    for job in jobs:
        canvas = job.canvas
        keys = np.empty((len(job.asked), 4), np.int64)
        keys[:, 0] = seed
        keys[:, 1] = canvas.row * PURPOSES + PROPOSAL
        keys[:, 2] = job.asked
        keys[:, 3] = canvas.step
        parts.append(keys)
    return torch.from_numpy(np.concatenate(parts))
