"""Steps of static shape: the same few launches again and again, as a CUDA graph.

A step of a cached 8B model launches some 700 kernels, which take the host longer than the GPU.
Padded to one of a few sizes (`BUCKETS`), a step has the same shapes and addresses every time: it
is captured once per size and then replayed.  Padding changes nothing for the real rows: padded
queries write their keys to a slot nobody reads, and attend to that slot alone.

Attention of a static step is one masked call over the beginning of the buffer, up to the last slot
it reads and rounded up to a power of two, so that what a step reads is data and not shape.  With
many rows, or one far behind in a pool, that would be wasteful, and such steps run as they are.

The capture has been written for CUDA and has not been run on a GPU yet; padding is tested on CPU,
where `Static` runs the padded step eagerly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..cache.base import Cache
from ..core.errors import ConfigError
from ..models.segments import Segment
from .kv import KVBuffer
from .packing import Packed

UNCAPTURED = ContextVar("UNCAPTURED", default=False)
BUCKETS = (16, 32, 64, 128, 256)  # padded numbers of queries; larger steps are busy enough as is
MOST_KEYS = 4  # times as many keys as the longest lane reads: what is masked costs as well


@contextmanager
def uncaptured() -> Iterator[None]:
    """Let ``cuda_graphs`` run its padded steps off a GPU too, as they are: to test the padding."""
    token = UNCAPTURED.set(True)
    try:
        yield
    finally:
        UNCAPTURED.reset(token)


def check_static(cache: Cache, device: torch.device) -> None:
    """Raise `ConfigError` where ``cuda_graphs`` would change nothing."""
    if device.type != "cuda" and not UNCAPTURED.get():
        raise ConfigError(f"cuda_graphs needs a CUDA GPU, not {device}: leave it out")
    if cache.name == "none" or cache.layerwise:
        which = "reads none" if cache.name == "none" else f"{cache.name!r} works layer by layer"
        raise ConfigError(
            f"cuda_graphs is for steps that read a cache ({which}): choose one, e.g. 'dual', or "
            "drop it"
        )


def bucket(count: int) -> int | None:
    """The size that ``count`` queries are padded to, None beyond the largest."""
    at = bisect_left(BUCKETS, count)
    return BUCKETS[at] if at < len(BUCKETS) else None


@dataclass(slots=True)
class Step:
    """Inputs of one size, at fixed addresses, and what replays it.

    ``ids``, ``positions`` (1, Q), ``slots`` (Q,) int64; ``mask`` (Q, K) is added to the scores: 0
    for what a query reads of the first K slots, else -inf; ``hidden`` (Q, D) is where the result
    appears.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor
    hidden: torch.Tensor | None = None
    graph: Any = None

    @classmethod
    def empty(cls, count: int, keys: int, device: torch.device, dtype: torch.dtype) -> Step:
        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        mask = torch.zeros(count, keys, dtype=dtype, device=device)
        return cls(integers(1, count), integers(1, count), integers(count), mask)

    def fill(self, packed: Packed, scratch: int) -> None:
        """Take the inputs of a ragged step; the rest of the rows is padding."""
        count = packed.ids.shape[1]
        assert packed.slots is not None
        self.ids.zero_()
        self.positions.zero_()
        self.slots.fill_(scratch)
        self.mask.fill_(-torch.inf)
        self.ids[:, :count].copy_(packed.ids)
        self.positions[:, :count].copy_(packed.positions)
        self.slots[:count].copy_(packed.slots)
        for segment in packed.segments:
            _allow(self.mask, segment)
        # without any key a row would be NaN, and its value would reach others as 0 * NaN
        self.mask[count:, scratch] = 0


def _allow(mask: torch.Tensor, segment: Segment) -> None:
    """Write what a segment reads into ``mask`` (Q, S)."""
    first, last, _ = segment.queries.indices(len(mask))
    size = (last - first) // segment.rows
    for row in range(segment.rows):
        queries = mask[first + row * size : first + (row + 1) * size]
        moved = row * segment.key_stride
        scores = 0.0 if segment.mask is None else segment.mask[row].to(mask.dtype)
        if isinstance(segment.keys, slice):
            low, high, _ = segment.keys.indices(mask.shape[1])
            queries[:, low + moved : high + moved] = scores
        elif isinstance(scores, torch.Tensor):
            queries.index_copy_(1, segment.keys + moved, scores)
        else:
            queries.index_fill_(1, segment.keys + moved, scores)


class Static:
    """Runs the cached steps of one engine with static shapes.

    ``scratch`` is a slot of ``buffer`` that no row owns: it takes what padding writes.  Raises
    `ConfigError` for flash attention, which takes no mask.
    """

    def __init__(self, backbone: nn.Module, buffer: KVBuffer, scratch: int) -> None:
        used = str(getattr(backbone.config, "_attn_implementation", ""))
        if "flash" in used:
            raise ConfigError(
                "cuda_graphs needs attention masks: load with attn_implementation='sdpa', or "
                "switch it off"
            )
        weight = next(backbone.parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self.buffer, self.scratch = buffer, scratch
        self.steps: dict[tuple[int, int], Step] = {}
        self._size = buffer.size
        self.captures = self.device.type == "cuda"
        self.backbone = backbone
        self._pool: Any = None
        self._no_mask = torch.empty(1, 1, 1, 1, device=self.device)

    def hidden(self, packed: Packed) -> torch.Tensor | None:
        """Final hidden states (Q, D) of a step, or None if it has to run as it is.

        They stay valid until the next call.
        """
        count = packed.ids.shape[1]
        size, keys = bucket(count), self._keys(packed)
        if size is None or keys is None or packed.slots is None:
            return None
        if self._size != self.buffer.size:  # the pool has grown: other addresses
            self.steps, self._size = {}, self.buffer.size
        step = self.steps.get((size, keys))
        if step is None:
            step = self.steps[size, keys] = Step.empty(size, keys, self.device, self.dtype)
        step.fill(packed, self.scratch)
        self.buffer.slots = step.slots
        if not self.captures:
            return self._run(step)[:count]
        if step.graph is None:
            self._capture(step)
        step.graph.replay()
        assert step.hidden is not None
        return step.hidden[:count]

    def _keys(self, packed: Packed) -> int | None:
        """How many slots a static step attends, None where most of them would be unused."""
        ends, longest = [self.scratch + 1], 0
        for segment in packed.segments:
            if isinstance(segment.keys, slice):
                first, last = segment.keys.start, segment.keys.stop
            else:
                first, last = 0, int(segment.keys[-1]) + 1
            longest = max(longest, last - first)
            ends.append(last + (segment.rows - 1) * segment.key_stride)
        keys: int = min(1 << (max(ends) - 1).bit_length(), self.buffer.size)
        return keys if keys <= MOST_KEYS * longest else None

    def _run(self, step: Step) -> torch.Tensor:
        queries, keys = step.mask.shape
        everything = Segment(slice(0, queries), slice(0, keys), mask=step.mask[None])
        hidden: torch.Tensor = self.backbone(
            input_ids=step.ids,
            position_ids=step.positions,
            attention_mask=self._no_mask,
            past_key_values=self.buffer,
            use_cache=False,
            segments=[everything],
        ).last_hidden_state[0]
        return hidden

    def _capture(self, step: Step) -> None:
        """Run twice beside the main stream, so that everything lazy has happened, then record."""
        stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # writes the same keys and values to the same slots
                self._run(step)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step.hidden = self._run(step)
        self._pool = self._pool or graph.pool()
        step.graph = graph
