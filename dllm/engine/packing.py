"""Many rows, each with its own plan, as one packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..canvas import PROPOSAL, PURPOSES, IntArray
from ..models.attention import Segment
from .rows import Job
from .visibility import Visibility, tensor

BIDIRECTIONAL = Visibility()


@dataclass(slots=True)
class Packed:
    """A packed forward.  ``lanes``: the lanes of all jobs in packed order; ``ids``, ``positions``
    (1, Q) int64; ``slots`` (Q,) int64 or None; ``scored`` (R,) int64 indexes the packed rows that
    meet the head, job by job; ``guided``, where some rows are: which of these (n,), the packed
    rows of their second lanes (n,), int64 both, and how strongly (n, 1) float32."""

    lanes: list[tuple[Job, int]]
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor | None
    segments: list[Segment]
    scored: torch.Tensor
    guided: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


def pack(
    jobs: Sequence[Job], shift: int, stored: bool, device: torch.device,
    visibility: Visibility = BIDIRECTIONAL,
) -> Packed:  # fmt: skip
    """Lay the jobs' computed positions end to end, all first lanes before the second ones.

    ``shift``: target t is scored by row t - shift.  ``stored``: keys are read from the buffer and
    not from this forward.
    """
    order = [(job, lane) for lane in (0, 1) for job in jobs if lane < job.lanes]
    ids: list[IntArray] = []
    positions: list[IntArray] = []
    slots: list[IntArray] = []
    segments: list[Segment] = []
    scored: tuple[list[IntArray], list[IntArray]] = [], []
    at = 0
    for job, lane in order:
        compute = job.plan.compute
        queries = slice(at, at + len(compute))
        ids.append(job.lane_tokens(lane)[compute])
        positions.append(compute)
        if stored:
            base, length, begin = job.base(lane), job.canvas.length, at
            slots.append(compute + base)
            for piece, read in job.plan.pieces(length):
                segments += visibility.segments(
                    job.canvas, piece, read, begin, base, length, device
                )
                begin += len(piece)
        else:
            keys = len(compute)
            segments += visibility.segments(job.canvas, compute, None, at, at, keys, device)
        scored[lane].append(_indices(compute, job.plan.rows(job.targets, shift)) + at)
        at += len(compute)
        if job.shadow.size:
            ids.append(np.full(len(job.shadow), job.canvas.mask_id))
            positions.append(job.shadow)
            segments.append(visibility.shadow(job.canvas, queries, job.shadow, device))
            scored[lane].append(at + np.arange(len(job.shadow)))
            at += len(job.shadow)
    return Packed(
        order,
        tensor(_join(ids), device)[None],
        tensor(_join(positions), device)[None],
        tensor(_join(slots), device) if slots else None,
        group(segments),
        tensor(_join(scored[0]), device),
        _guided(jobs, scored[1], device) if scored[1] else None,
    )


def _guided(
    jobs: Sequence[Job], second: list[IntArray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`Packed.guided`: a guided job has targets only, no shadow."""
    at, which, scales = 0, [], []
    for job in jobs:
        count = len(job.asked)
        if job.lanes > 1:
            which.append(np.arange(at, at + count))
            scales.append(np.full(count, job.row.recipe.config.cfg_scale))
        at += count
    scale = torch.from_numpy(_join(scales)).float().to(device)
    return tensor(_join(which), device), tensor(_join(second), device), scale[:, None]


def _join(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _indices(compute: IntArray, rows: IntArray) -> IntArray:
    """Where ``rows`` stand in ``compute``; both ascending, rows contained in compute."""
    run = len(compute) == compute[-1] - compute[0] + 1
    result: IntArray = rows - compute[0] if run else np.searchsorted(compute, rows)
    return result


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


def noise_keys(jobs: Sequence[Job]) -> torch.Tensor:
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
    return torch.from_numpy(np.concatenate(parts))
