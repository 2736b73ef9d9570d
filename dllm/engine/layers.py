"""The hook of caches that decide layer by layer.

Such a cache may, before each decoder layer, narrow the positions that the layer computes (the
others take what the layer added to them last time), widen them (the others' inputs are those of
their last time) or choose what they read; and it may look at the layer's attention.  It sees
NumPy only, through `View`; the tensors stay here.  The decoder layers themselves are those of
transformers: for the time of one forward their arguments and results pass through this hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..cache import Cache
from ..cache.base import LayerPlan
from ..canvas import FloatArray, IntArray
from .kv import KVBuffer
from .packing import Job, Packed, group, segments_of, tensor

Forward = Callable[..., Tensor]


@dataclass(slots=True, eq=False)
class Piece:
    """One lane of one row at the present layer.

    ``stream``: ascending positions whose hidden states have reached the layer; ``now``: what the
    layer computes and reads; ``base``: the lane's first slot; ``rows`` computed in all layers.
    """

    job: Job
    base: int
    memory: dict[Any, Any]
    stream: IntArray
    now: LayerPlan = field(init=False)
    rows: int = 0

    def slots(self, positions: IntArray) -> IntArray:
        return positions + self.base


class LayerHook:
    """Lets ``cache`` decide at every layer of ``backbone``; used by the engine per forward."""

    def __init__(
        self, backbone: nn.Module, cache: Cache, buffer: KVBuffer, grid: int | None = None
    ) -> None:
        self.backbone, self.cache, self.buffer, self.grid = backbone, cache, buffer, grid
        self.layers: Sequence[nn.Module] = getattr(backbone, "layers", ())
        self.pieces: list[Piece] = []
        self.index = 0
        self.inputs: Tensor  # (1, Q, D), hidden states of the streams
        self.module: Any = None
        self.queries: Tensor
        self.keys: Tensor

    @contextmanager
    def attached(self, jobs: Sequence[Job], packed: Packed) -> Iterator[None]:
        """Hook the layers for one forward over ``packed``."""
        self.packed = packed
        self.pieces = [
            Piece(job, job.base(lane),
                  job.row.slots.layers.setdefault(lane, {}), job.plan.compute)
            for lane in range(jobs[0].lanes) for job in jobs
        ]  # fmt: skip
        with ExitStack() as stack:
            for i, layer in enumerate(self.layers):
                stack.enter_context(_wrapped(layer, partial(self._run, i, layer)))
            yield
        for job in jobs if self.layers else ():
            rows = sum(piece.rows for piece in self.pieces if piece.job is job)
            job.work = round(rows / len(self.layers))

    def watch(self, queries: Tensor, keys: Tensor) -> None:
        """Called by the attention of the present layer with (1, H, C, dh) and (1, Hkv, S, dh)."""
        self.queries, self.keys = queries, keys
        for piece in self.pieces:
            row = piece.job.row
            self.cache.after_attention(row.canvas, row.slots, View(self, piece))

    def _run(self, index: int, module: nn.Module, forward: Forward, hidden: Tensor,
             **kwargs: Any) -> Tensor:  # fmt: skip
        """One layer: ask the cache, compute what it says, put the rows back among the others."""
        self.index, self.module, self.inputs = index, module, hidden
        streams = [piece.stream for piece in self.pieces]
        if self.cache.keeps == "input":
            self.buffer.keep(index, self._slots(streams), hidden[0])
        if not self._ask():
            self.buffer.slots = self.packed.slots
            output = forward(hidden, **kwargs)
            if self.cache.keeps == "change":
                self.buffer.keep(index, self._slots(streams), (output - hidden)[0])
            return output
        self._widen()
        output = self._partial(forward, kwargs)
        return self._as_packed(output) if index == len(self.layers) - 1 else output

    def _ask(self) -> bool:
        """Set every piece's `now`; whether it differs anywhere from the forward as packed."""
        asked = False
        for piece in self.pieces:
            row, plan = piece.job.row, piece.job.plan
            result = self.cache.before_layer(row.canvas, row.slots, View(self, piece))
            asked |= result is not None or len(piece.stream) != len(plan.compute)
            piece.now = result or LayerPlan(piece.stream, plan.read)
            piece.rows += len(piece.now.compute)
        return asked

    def _partial(self, forward: Forward, kwargs: dict[str, Any]) -> Tensor:
        """The streams after a layer that computes some of their rows."""
        computes = [piece.now.compute for piece in self.pieces]
        changes, output = self.cache.keeps == "change", self.inputs.clone()
        if changes:
            slots = self._slots([piece.stream for piece in self.pieces])
            output += self.buffer.kept(self.index, slots)
        if not sum(map(len, computes)):
            return output
        at, where = 0, []
        for piece in self.pieces:
            where.append(np.searchsorted(piece.stream, piece.now.compute) + at)
            at += len(piece.stream)
        rows, positions = self._tensor(where), self._tensor(computes)[None]
        self.buffer.slots = self._slots(computes)
        hidden, rotary = self.inputs[:, rows], cast(Any, self.backbone).rotary_emb
        kwargs |= {
            "position_ids": positions,
            "position_embeddings": rotary(hidden, position_ids=positions),
            "segments": group(list(self._segments())),
        }
        computed = forward(hidden, **kwargs)
        output[:, rows] = computed
        if changes:
            self.buffer.keep(self.index, self.buffer.slots, (computed - hidden)[0])
        return output

    def _widen(self) -> None:
        """Let positions join the streams with the inputs they had when last computed."""
        wider = [np.union1d(piece.stream, piece.now.compute) for piece in self.pieces]
        if sum(map(len, wider)) == self.inputs.shape[1]:
            return
        for piece, stream in zip(self.pieces, wider, strict=True):
            piece.stream = stream
        self.inputs = self.buffer.kept(self.index, self._slots(wider))[None]

    def _segments(self) -> Iterator[Any]:
        at = 0
        for piece in self.pieces:
            now, length = piece.now, piece.job.row.canvas.length
            if now.compute.size:
                yield from segments_of(now.compute, now.read, at, piece.base, length,
                                       self.inputs.device, self.grid)  # fmt: skip
            at += len(now.compute)

    def _as_packed(self, hidden: Tensor) -> Tensor:
        """The rows of the streams that were planned, in their order."""
        if hidden.shape[1] == self.packed.ids.shape[1]:
            return hidden
        at, where = 0, []
        for piece in self.pieces:
            where.append(np.searchsorted(piece.stream, piece.job.plan.compute) + at)
            at += len(piece.stream)
        return hidden[:, self._tensor(where)]

    def _tensor(self, parts: list[IntArray]) -> Tensor:
        return tensor(np.concatenate(parts), self.inputs.device)

    def _slots(self, parts: list[IntArray]) -> Tensor:
        pairs = zip(self.pieces, parts, strict=True)
        return self._tensor([piece.slots(part) for piece, part in pairs])


class View:
    """One row at one layer, as a cache sees it (`dllm.cache.base.Layer`)."""

    def __init__(self, hook: LayerHook, piece: Piece) -> None:
        self._hook, self._piece = hook, piece
        self.index, self.memory, self.stream = hook.index, piece.memory, piece.stream

    def value_similarity(self, positions: IntArray) -> FloatArray:
        hook, module = self._hook, self._hook.module
        rows = hook.inputs[0, self._where(self.stream, positions, own=True)]
        fresh = module.self_attn.v_proj(module.input_layernorm(rows))
        slots = self._indices(self._piece.slots(positions))
        stored = hook.buffer.values(self.index)[0, :, slots].transpose(0, 1).flatten(1)
        hook.buffer.values(self.index)[0, :, slots] = fresh.unflatten(
            1, (-1, module.self_attn.head_dim)
        ).transpose(0, 1)
        return _numpy(torch.cosine_similarity(fresh.float(), stored.float(), dim=1))

    def attention(self, queries: IntArray) -> FloatArray:
        q, k = self._queries(queries), self._hook.keys[0]
        read = self._piece.now.read
        length = self._piece.job.row.canvas.length
        read = np.arange(length) if read is None else read
        k = k[:, self._indices(self._piece.slots(read))].float()
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        scores = q @ k.transpose(1, 2) * self._hook.module.self_attn.scaling
        scores.masked_fill_(self._unseen(queries, read), -torch.inf)
        result = np.zeros((len(queries), length), np.float32)
        result[:, read] = _numpy(scores.softmax(-1).mean(0))
        return result

    def key_importance(self, queries: IntArray, keys: IntArray) -> FloatArray:
        q = self._queries(queries).mean(1)
        k = self._hook.keys[0][:, self._indices(self._piece.slots(keys))].float()
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        result = (k @ q[:, :, None]).squeeze(-1).mean(0)
        return _numpy(result.masked_fill_(self._unseen(queries[-1:], keys)[0], -torch.inf))

    def _unseen(self, queries: IntArray, keys: IntArray) -> Tensor:
        """(n, m) bool: keys in later blocks than the query, where attention is block-causal."""
        grid = self._hook.grid
        if grid is None:
            hidden = np.zeros((len(queries), len(keys)), np.bool_)
        else:
            hidden = keys // grid > queries[:, None] // grid
        return torch.from_numpy(hidden).to(self._hook.inputs.device)

    def _queries(self, positions: IntArray) -> Tensor:
        """(H, n, dh) float32 of computed positions."""
        where = self._where(self._piece.now.compute, positions, own=False)
        return self._hook.queries[0][:, where].float()

    def _where(self, among: IntArray, positions: IntArray, own: bool) -> Tensor:
        """Where ``positions`` stand on the packed axis of streams (``own``) or computed rows."""
        at = 0
        for piece in self._hook.pieces:
            if piece is self._piece:
                break
            at += len(piece.stream) if own else len(piece.now.compute)
        return self._indices(np.searchsorted(among, positions) + at)

    def _indices(self, indices: IntArray) -> Tensor:
        return tensor(indices, self._hook.inputs.device)


@contextmanager
def _wrapped(module: nn.Module, run: Callable[..., Tensor]) -> Iterator[None]:
    """``module`` with its forward passed through ``run``."""
    own = module.__dict__.get("forward")
    module.forward = partial(run, module.forward)
    try:
        yield
    finally:
        del module.forward
        if own is not None:  # somebody else's wrapper, e.g. accelerate's
            module.forward = own


def _numpy(x: Tensor) -> FloatArray:
    result: FloatArray = x.float().cpu().numpy()
    return result
