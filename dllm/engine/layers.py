"""The hook of caches that decide layer by layer.

Such a cache may, before each decoder layer, narrow the positions that the layer computes (the
others take what the layer added to them last time) or widen them (the others' inputs are those of
their last time); and it may look at the layer's attention.  It sees
NumPy only, through `View`; the tensors stay here.  The decoder layers themselves are those of
transformers.  The hook runs a copy of the backbone, of the module object and not of its weights,
whose list of layers is its own: each entry passes arguments and results through the hook.  The
shared model is never touched, so that several engines may run on it at once, in any threads.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from ..cache import Cache
from ..core.canvas import FloatArray, IntArray
from ..kernels.transfer import tensor
from .kv import KVBuffer
from .packing import Packed, grouped
from .rows import Job
from .visibility import Piece as Attended
from .visibility import Visibility


@dataclass(slots=True, eq=False)
class Piece:
    """One lane of one row at the present layer.

    ``stream``: ascending positions whose hidden states have reached the layer; ``now``: what the
    layer computes; ``base``: the lane's first slot; ``rows`` computed in all layers.
    """

    job: Job
    base: int
    memory: dict[Any, Any]
    stream: IntArray
    now: IntArray = field(init=False)
    rows: int = 0


class Hooked(nn.Module):
    """A decoder layer whose calls go through ``run``; what else is asked of it, the layer answers.
    The layer is not registered as a submodule: its weights belong to the shared model."""

    def __init__(self, layer: nn.Module, run: Callable[..., Tensor], index: int) -> None:
        super().__init__()
        self.__dict__["_hooked"] = layer
        self._run, self._index = run, index

    def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
        return self._run(self._index, self._hooked, hidden, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_hooked"], name)


def hooked(backbone: nn.Module, run: Callable[..., Tensor]) -> nn.Module:
    """``backbone`` with its own list of layers, each of which goes through ``run``."""
    twin = copy.copy(backbone)
    twin.__dict__ = dict(backbone.__dict__)
    twin.__dict__.pop("forward", None)  # somebody else's wrapper, bound to the original
    twin._modules = dict(backbone._modules)
    layers = cast(Sequence[nn.Module], backbone.layers)
    twin._modules["layers"] = nn.ModuleList(Hooked(x, run, i) for i, x in enumerate(layers))
    return twin


class LayerHook:
    """Lets ``cache`` decide at every layer of ``backbone``, in the forwards of one engine."""

    def __init__(
        self, backbone: nn.Module, cache: Cache, buffer: KVBuffer, visibility: Visibility
    ) -> None:
        self.backbone, self.cache, self.buffer = backbone, cache, buffer
        self.visibility = visibility
        self.layers: Sequence[nn.Module] = getattr(backbone, "layers", ())
        self._hooked = hooked(backbone, self._run) if self.layers else backbone
        main = next((x.device for x in backbone.parameters()), torch.device("cpu"))
        places = [next((x.device for x in each.parameters()), main) for each in self.layers]
        # where the main one is, layers run that were offloaded
        self.devices = [main if at.type == "meta" else at for at in places]
        self.pieces: list[Piece] = []
        self.inputs: Tensor  # (1, Q, D), hidden states of the streams
        self.module: Any = None
        self.queries: Tensor
        self.keys: Tensor

    def run(self, packed: Packed, inputs: Mapping[str, Any]) -> Tensor:
        """One forward over ``packed``: final hidden states (Q, D)."""
        self.packed = packed
        self.pieces = [
            Piece(job, job.base(lane), job.row.slots.layers.setdefault(lane, {}), job.plan.compute)
            for job, lane in packed.lanes
        ]
        hidden: Tensor = self._hooked(**inputs, watch=self.watch).last_hidden_state[0]
        for job, lane in packed.lanes if self.layers else ():
            if lane == 0:
                rows = sum(piece.rows for piece in self.pieces if piece.job is job)
                job.work = round(rows / len(self.layers))
        return hidden

    def watch(self, module: nn.Module, queries: Tensor, keys: Tensor) -> None:
        """Called by the attention of the present layer with (1, H, C, dh) and (1, Hkv, S, dh)."""
        self.queries, self.keys = queries, keys
        for piece in self.pieces:
            row = piece.job.row
            self.cache.after_attention(row.canvas, row.slots, View(self, piece))

    def _run(self, index: int, module: nn.Module, hidden: Tensor, **kwargs: Any) -> Tensor:
        """One layer: ask the cache, compute what it says, put the rows back among the others."""
        hidden = hidden.to(self.devices[index])  # the layer before may lie on another one
        self.index, self.module, self.inputs = index, module, hidden
        streams = [piece.stream for piece in self.pieces]
        if self.cache.keeps == "input":
            self.buffer.keep(index, self._slots(streams), hidden[0])
        if not self._ask():
            self.buffer.slots = self.packed.slots
            output: Tensor = module(hidden, **kwargs)
            if self.cache.keeps == "change":
                self.buffer.keep(index, self._slots(streams), (output - hidden)[0])
            return output
        wider = [np.union1d(piece.stream, piece.now) for piece in self.pieces]
        if sum(map(len, wider)) != self.inputs.shape[1]:
            # Positions join the streams with the inputs they had when last computed.
            for piece, stream in zip(self.pieces, wider, strict=True):
                piece.stream = stream
            self.inputs = self.buffer.kept(self.index, self._slots(wider))[None]
        output = self._partial(module, kwargs)
        if index < len(self.layers) - 1 or output.shape[1] == self.packed.ids.shape[1]:
            return output
        return output[:, self._among([piece.job.plan.compute for piece in self.pieces])]

    def _ask(self) -> bool:
        """Set every piece's `now`; whether it differs anywhere from the forward as packed."""
        asked = False
        for piece in self.pieces:
            row, plan = piece.job.row, piece.job.plan
            result = self.cache.before_layer(row.canvas, row.slots, View(self, piece))
            asked |= result is not None or len(piece.stream) != len(plan.compute)
            piece.now = piece.stream if result is None else result
            piece.rows += len(piece.now)
        return asked

    def _partial(self, module: nn.Module, kwargs: dict[str, Any]) -> Tensor:
        """The streams after a layer that computes some of their rows."""
        computes = [piece.now for piece in self.pieces]
        changes, output = self.cache.keeps == "change", self.inputs.clone()
        if changes:
            slots = self._slots([piece.stream for piece in self.pieces])
            output += self.buffer.kept(self.index, slots)
        if not sum(map(len, computes)):
            return output
        rows, positions = self._among(computes), self._tensor(computes)[None]
        self.buffer.slots = self._slots(computes)
        hidden, rotary = self.inputs[:, rows], cast(Any, self.backbone).rotary_emb
        kwargs |= {
            "position_ids": positions,
            "position_embeddings": rotary(hidden, position_ids=positions),
            "segments": grouped(self._pieces(), hidden.device),
        }
        computed = module(hidden, **kwargs)
        output[:, rows] = computed
        if changes:
            self.buffer.keep(self.index, self.buffer.slots, (computed - hidden)[0])
        return output

    def _pieces(self) -> Iterator[Attended]:
        at = 0
        for piece in self.pieces:
            now, plan, canvas = piece.now, piece.job.plan, piece.job.canvas
            if now.size:
                yield from self.visibility.pieces(
                    now, plan.read, at, piece.base, canvas.length, canvas.masked
                )
            at += len(now)

    def _among(self, parts: list[IntArray]) -> Tensor:
        """Where positions of each piece stand on the packed axis of the streams."""
        at, where = 0, []
        for piece, part in zip(self.pieces, parts, strict=True):
            where.append(np.searchsorted(piece.stream, part) + at)
            at += len(piece.stream)
        return self._tensor(where)

    def _tensor(self, parts: list[IntArray]) -> Tensor:
        return tensor(np.concatenate(parts), self.inputs.device)

    def _slots(self, parts: list[IntArray]) -> Tensor:
        pairs = zip(self.pieces, parts, strict=True)
        return self._tensor([part + piece.base for piece, part in pairs])


class View:
    """One row at one layer, as a cache sees it (`dllm.cache.base.Layer`)."""

    def __init__(self, hook: LayerHook, piece: Piece) -> None:
        self._hook, self._piece = hook, piece
        self.index, self.memory, self.stream = hook.index, piece.memory, piece.stream

    def value_similarity(self, positions: IntArray) -> FloatArray:
        hook, module = self._hook, self._hook.module
        rows = hook.inputs[0, self._where(self.stream, positions, own=True)]
        fresh = module.self_attn.v_proj(module.input_layernorm(rows))
        slots = self._indices(positions + self._piece.base)
        values = hook.buffer.values(self.index)[0]
        stored = rearrange(values[:, slots], "h n d -> n (h d)")
        values[:, slots] = rearrange(fresh, "n (h d) -> h n d", d=module.self_attn.head_dim)
        return _numpy(torch.cosine_similarity(fresh.float(), stored.float(), dim=1))

    def attention(self, queries: IntArray) -> FloatArray:
        where = self._where(self._piece.now, queries, own=False)
        q, k = self._hook.queries[0][:, where].float(), self._hook.keys[0]
        read = self._piece.job.plan.read
        length = self._piece.job.row.canvas.length
        read = np.arange(length) if read is None else read
        k = k[:, self._indices(read + self._piece.base)].float()
        k = k.repeat_interleave(len(q) // len(k), dim=0)
        scores = q @ k.transpose(1, 2) * self._hook.module.self_attn.scaling
        hidden = self._hook.visibility.unseen(self._piece.job.canvas, queries, read)
        scores.masked_fill_(torch.from_numpy(hidden).to(scores.device), -torch.inf)
        result = np.zeros((len(queries), length), np.float32)
        result[:, read] = _numpy(scores.softmax(-1).mean(0))
        return result

    def _where(self, among: IntArray, positions: IntArray, own: bool) -> Tensor:
        """Where ``positions`` stand on the packed axis of streams (``own``) or computed rows."""
        at = 0
        for piece in self._hook.pieces:
            if piece is self._piece:
                break
            at += len(piece.stream) if own else len(piece.now)
        return self._indices(np.searchsorted(among, positions) + at)

    def _indices(self, indices: IntArray) -> Tensor:
        return tensor(indices, self._hook.inputs.device)


def _numpy(x: Tensor) -> FloatArray:
    return x.float().cpu().numpy()
