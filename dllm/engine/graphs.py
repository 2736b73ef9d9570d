"""Steps of static shape: the same few launches again and again, as a CUDA graph.

A step of an 8B model launches some 700 kernels, which take the host longer than the GPU.  Padded
to one of a few sizes, a step has the same shapes and addresses every time: it is captured when it
is met a second time and replayed from then on.  What a row reads is data and not shape, as
FlashAttention's variable-length kernel has it.  Padding changes nothing for the real rows: padded
queries are rows of their own, which write their keys to a slot that nobody else reads, and attend
to that slot alone.

Off a GPU `Static` runs the padded step as it is: that is how padding is tested.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from ..cache.base import Cache
from ..core.errors import ConfigError
from ..kernels.transfer import upload
from ..models.attention import PREFIX, VARLEN
from ..models.forwards import CACHE
from ..models.varlen import Borders, Spans
from .kv import KVBuffer, Scratch
from .packing import Packed

UNCAPTURED = ContextVar("UNCAPTURED", default=False)
MOST = 2048  # queries; larger steps keep a GPU busy as they are


@contextmanager
def uncaptured() -> Iterator[None]:
    """Let ``cuda_graphs`` run its padded steps off a GPU too, as they are: to test the padding."""
    token = UNCAPTURED.set(True)
    try:
        yield
    finally:
        UNCAPTURED.reset(token)


def check_static(cache: Cache, backbone: nn.Module) -> None:
    """Raise `ConfigError` where ``cuda_graphs`` cannot be."""
    weight: torch.Tensor = next(backbone.parameters())
    if weight.device.type != "cuda" and not UNCAPTURED.get():
        raise ConfigError(f"cuda_graphs needs a CUDA GPU, not {weight.device}: leave it out")
    if cache.layerwise:
        raise ConfigError(
            f"cuda_graphs is for whole steps, and {cache.name!r} works layer by layer: choose "
            "another cache, e.g. 'dual', or drop it"
        )
    if len({each.device for each in backbone.parameters()}) > 1:
        raise ConfigError("cuda_graphs is for a model on one GPU: leave device_map out, or drop it")
    config: Any = backbone.config
    used = str(getattr(config, "_attn_implementation", "")).removeprefix(PREFIX)
    varlen = VARLEN.get(used)
    if varlen is None or not varlen.offsets:
        raise ConfigError(
            f"cuda_graphs does not work with {used!r} attention: load with "
            "attn_implementation='sdpa', or drop it"
        )
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if weight.device.type == "cuda" and not varlen.suits(weight.new_empty(size), size):
        raise ConfigError(
            f"cuda_graphs needs FlashAttention, which this GPU has not for {str(weight.dtype)[6:]} "
            f"and heads of {size}: load with dtype='bfloat16', or drop it"
        )


def bucket(count: int) -> int:
    """What ``count`` is padded to: multiples of 16, then of an eighth of the next power of two."""
    unit = max(16, _power(count) // 8)
    return -(-count // unit) * unit


def _power(count: int) -> int:
    return 1 << (count - 1).bit_length()


@dataclass(slots=True)
class Step:
    """Inputs of one shape, at fixed addresses, and what replays it.

    ``ids``, ``positions`` (1, Q), ``slots`` (Q,) int64; ``borders`` of its rows; ``buffer`` takes
    its keys and values; ``hidden`` (Q, D) is where the result appears.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    borders: Borders
    buffer: KVBuffer
    met: int = 0
    hidden: torch.Tensor | None = None
    graph: Any = None

    @classmethod
    def empty(
        cls, count: int, rows: int, longest: int, keys: int, buffer: KVBuffer, device: torch.device
    ) -> Self:
        """For ``count`` queries of ``rows`` rows with at most ``longest`` each, over the keys of
        ``buffer`` or over ``keys`` of them, gathered."""

        def integers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        queries, starts, used = (
            integers(size, dtype=torch.int32) for size in (rows + 1, rows + 1, rows)
        )
        index = integers(keys) if keys else None
        borders = Borders(queries, starts, longest, keys or buffer.size, index, used)
        return cls(integers(1, count), integers(1, count), integers(count), borders, buffer)

    def fill(self, packed: Packed, spans: Spans, scratch: int) -> None:
        """Take the inputs of a ragged step; what is left are rows of padding."""
        count, size, own = packed.ids.shape[1], self.ids.shape[1], self.borders
        assert own.used is not None
        rows, longest = len(own.used), own.most_queries
        more = rows - len(spans.ends)
        ends = [min(size, count + longest * (i + 1)) for i in range(more)]
        held = 0 if spans.index is None else len(spans.index)
        first = scratch if spans.index is None else held
        up = upload([np.array(each, np.int32) for each in (
            [0, *spans.ends, *ends], [*spans.starts, *[first] * (more + 1)],
            [*spans.used, *[1] * more],
        )], self.ids.device)  # fmt: skip
        for there, given in zip((own.queries, own.keys, own.used), up, strict=True):
            there.copy_(given)
        self.slots[count:].fill_(scratch)
        if packed.slots is not None:
            self.slots[:count].copy_(packed.slots)
        else:
            torch.arange(count, out=self.slots[:count])
        self.positions[:, :count].copy_(packed.positions)
        if own.index is not None and spans.index is not None:
            own.index[held:].fill_(scratch)
            own.index[:held].copy_(spans.index)


class Static:
    """Runs the steps of one engine with static shapes.

    ``scratch`` is a slot of ``buffer`` that no row owns: it takes what padding writes.  Without a
    buffer every shape has one of its own, for the keys and values of its queries.
    """

    def __init__(
        self, backbone: nn.Module, buffer: KVBuffer | None = None, scratch: int = 0
    ) -> None:
        self.device: torch.device = next(backbone.parameters()).device
        self.backbone, self.buffer, self.scratch = backbone, buffer, scratch
        self.steps: dict[tuple[int, ...], Step] = {}
        self.captures = self.device.type == "cuda"
        self._size = None if buffer is None else buffer.size
        self._pool: Any = None
        self._stream: Any = None
        self._last: tuple[Any, Step | None] = None, None
        self._no_mask = torch.empty(1, 1, 1, 1, device=self.device)

    def hidden(self, packed: Packed) -> torch.Tensor | None:
        """Final hidden states (Q, D) of a step, or None if it has to run as it is.

        They stay valid until the next call.
        """
        count = packed.ids.shape[1]
        if self.buffer is not None and self._size != self.buffer.size:  # it grew: other addresses
            self.steps, self._size, self._last = {}, self.buffer.size, (None, None)
        step = self._filled(packed)
        if step is None:
            return None
        step.met += 1
        step.ids[:, :count].copy_(packed.ids)
        step.buffer.slots = step.slots
        if not self.captures or (step.met == 1 and step.graph is None):
            return self._run(step)[:count]
        if step.graph is None:
            self._capture(step)
        step.graph.replay()
        assert step.hidden is not None
        return step.hidden[:count]

    def _filled(self, packed: Packed) -> Step | None:
        """The step with the layout of ``packed``: it stays while that does."""
        if self._last[0] is packed.segments:
            return self._last[1]
        self._last = packed.segments, None
        count = packed.ids.shape[1]
        if packed.sliding is not None or count > MOST:
            return None
        slots = count if self.buffer is None else self.buffer.size
        spans = Spans.of(packed.segments, slots, self.device)
        if spans is None or spans.ends[-1] != count:
            return None
        size, longest = bucket(count), _power(spans.longest)
        rows = _power(len(spans.ends) - (count - size) // longest)
        keys = 0 if spans.index is None else _power(len(spans.index) + 1)
        shape = size, rows, longest, keys
        step = self.steps.get(shape)
        if step is None:
            buffer = Scratch(size, self.device) if self.buffer is None else self.buffer
            step = self.steps[shape] = Step.empty(*shape, buffer, self.device)
        # without a buffer the first query of padding has the first slot that is not read
        step.fill(packed, spans, count if self.buffer is None else self.scratch)
        self._last = packed.segments, step
        return step

    def _run(self, step: Step) -> torch.Tensor:
        hidden: torch.Tensor = self.backbone(
            input_ids=step.ids, position_ids=step.positions, attention_mask=self._no_mask,
            use_cache=False, segments=step.borders, **{CACHE: step.buffer},
        ).last_hidden_state[0]  # fmt: skip
        return hidden

    def _capture(self, step: Step) -> None:
        """Run beside the main stream, so that everything lazy has happened, then record."""
        if self._stream is None:  # one for all steps, so that these share memory
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream, main = self._stream, torch.cuda.current_stream(self.device)
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            self._run(step)  # writes the same keys and values to the same slots as the step itself
        main.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # PyTorch's own stream is of the device that was first; other threads may ask for memory
        with (
            torch.cuda.device(self.device),
            torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"),
        ):
            step.hidden = self._run(step)
        self._pool = self._pool or graph.pool()
        step.graph = graph
