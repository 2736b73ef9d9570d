"""Many rows, each with its own plan, as one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .cache import Plan, Slots
from .canvas import PROPOSAL, PURPOSES, Canvas, IntArray
from .models.attention import Segment


@dataclass(slots=True)
class Row:
    """A canvas in the engine: the freshness of its slots, and its lanes in the buffer.

    A guided row has two lanes: as it is, and with the given text masked.
    """

    canvas: Canvas
    slots: Slots
    lane: int = 0
    lanes: int = 1

    def lane_tokens(self, lane: int) -> IntArray:
        """Token ids of a lane, (N,)."""
        canvas = self.canvas
        return canvas.tokens if lane == 0 else np.where(canvas.given, canvas.mask_id, canvas.tokens)

    def base(self, lane: int, stride: int) -> int:
        """The first slot of a lane in a buffer with ``stride`` slots per lane."""
        return (self.lane + lane) * stride


@dataclass(slots=True)
class Job:
    """What one row wants of this step.  ``work``: positions computed per layer on average, where
    layers differ."""

    row: Row
    plan: Plan
    targets: IntArray
    work: int | None = None

    @property
    def size(self) -> int:
        """Token positions it feeds to the model."""
        return len(self.plan.compute) * self.row.lanes

    @property
    def cost(self) -> int:
        """Token positions that the model computed for it."""
        return self.size if self.work is None else self.work


@dataclass(slots=True)
class Packed:
    """A packed forward.  ``ids``, ``positions`` (1, Q) int64; ``slots`` (Q,) int64 or None;
    ``scored`` (lanes, R) int64 indexes the packed rows that meet the head."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor | None
    segments: list[Segment]
    scored: torch.Tensor


def pack(jobs: Sequence[Job], shift: int, stride: int | None, device: torch.device) -> Packed:
    """Lay the jobs' computed positions end to end.

    ``shift``: target t is scored by row t - shift.  ``stride``: slots per lane of the buffer, or
    None when keys and values are not kept.
    """
    lanes = jobs[0].row.lanes
    ids: list[IntArray] = []
    positions: list[IntArray] = []
    slots: list[IntArray] = []
    segments: list[Segment] = []
    scored: list[list[IntArray]] = [[] for _ in range(lanes)]
    at = 0
    for lane in range(lanes):
        for job in jobs:
            compute, row = job.plan.compute, job.row
            ids.append(row.lane_tokens(lane)[compute])
            positions.append(compute)
            if stride is None:
                queries = slice(at, at + len(compute))
                segments.append(Segment(queries, queries))
            else:
                base = row.base(lane, stride)
                slots.append(compute + base)
                segments += segments_of(compute, job.plan.read, at, base, row.canvas.length, device)
            scored[lane].append(_indices(compute, np.maximum(job.targets - shift, 0)) + at)
            at += len(compute)
    return Packed(
        tensor(_join(ids), device)[None],
        tensor(_join(positions), device)[None],
        tensor(_join(slots), device) if slots else None,
        group(segments),
        tensor(np.stack([_join(part) for part in scored]), device),
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
    found: IntArray = rows - compute[0] if run else np.searchsorted(compute, rows)
    return found


def segments_of(
    compute: IntArray, read: IntArray | None, at: int, base: int, length: int, device: torch.device
) -> list[Segment]:
    """The segments of a row whose queries ``compute`` begin at ``at`` on the packed axis and whose
    keys lie in the slots from ``base``: those of ``read``, or all ``length`` live ones."""
    keys = slice(base, base + length) if read is None else tensor(read + base, device)
    return [Segment(slice(at, at + len(compute)), keys)]


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
    """(R, 4) int64: seed, stream, position, step of every target, for keyed proposals."""
    parts = []
    for job in jobs:
        canvas = job.row.canvas
        keys = np.empty((len(job.targets), 4), np.int64)
        keys[:, 0] = seed
        keys[:, 1] = canvas.row * PURPOSES + PROPOSAL
        keys[:, 2] = job.targets
        keys[:, 3] = canvas.step
        parts.append(keys)
    return torch.from_numpy(np.concatenate(parts))
