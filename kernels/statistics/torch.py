"""Token statistics in plain PyTorch, a tile of logits at a time.

A plain linear head is cut along the vocabulary: the product of a tile is computed in the dtype of
the weight (as the model itself would: half precision accumulates in float32 and rounds the
logits), then reduced in float32, on a CPU in pieces that fit its cache.  Other heads, and
filters, need full rows and are cut along the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch

from ..linear import ROWS, Packed, packed_of
from ..linear import product as product_with
from ..quantised import QuantisedLinear
from .heads import Head, full_logits, plain_linear, vocabulary
from .reduce import Partial, compiled, finish, merge, reduce, stack
from .result import Inputs, Options, TokenStatistics

TILE_BYTES = 16 << 20  # logits held at once, counted as float32
PIECE = 1 << 17  # elements reduced at once: with their exponentials 1 MB, half of a usual L2 cache
MOST_ROWS = 1024  # more rows would make tiles too narrow for an efficient product

Product = Callable[[int, int, int, int], torch.Tensor]  # rows [a, b), ids [low, high) -> logits


class Call:
    """The arguments of one call that differ by row, ready to be cut."""

    def __init__(self, options: Options, inputs: Inputs, first_id: int = 0) -> None:
        self.first_id = first_id  # of a share of the vocabulary
        banned = inputs.banned
        self.options, self.banned_rows = options, inputs.banned_rows
        self.banned: list[int] = (
            banned.tolist() if isinstance(banned, torch.Tensor) else list(banned or ())
        )
        self.keys, self.select = inputs.noise_keys, inputs.select
        self.room: torch.Tensor | None = None  # fresh memory would not be in the cache

    def piece(self, x: torch.Tensor, first: int, low: int) -> Partial:
        """Reduce ``x`` (r, n) float32, rows from ``first`` and ids from ``low`` on; destroys x."""
        last = first + x.shape[0]
        self._ban(x, first, low)
        keys = None if self.keys is None else self.keys[first:last]
        select = None if self.select is None else self.select[first:last]
        return reduce(x, low, self.options, keys, select, self._room(x, 1))

    def _ban(self, x: torch.Tensor, first: int, low: int) -> None:
        for j, token in enumerate(self.banned):
            if low <= token < low + x.shape[1]:
                column = x.select(1, token - low)
                if self.banned_rows is None:
                    column.fill_(-torch.inf)
                else:
                    rows = self.banned_rows[first : first + len(x), j]
                    column.masked_fill_(rows, -torch.inf)

    def tile(self, logits: torch.Tensor, first: int, low: int, owned: bool) -> Partial:
        """Reduce logits (r, n) of any dtype; they may be destroyed if ``owned``."""
        options = self.options
        more = options.filtered or options.top or options.classes is not None
        if owned and self.keys is None and self.select is None and not more:
            self._ban(logits, first, low)
            part = compiled(logits, options)
            if part is not None:
                part.index += low
                return part
        copy = logits.dtype != torch.float32 or not owned
        elements = PIECE if logits.device.type == "cpu" else logits.numel()
        step = max(1, elements // max(1, logits.shape[1]))
        pieces = []
        for row in range(0, max(1, len(logits)), step):
            x = logits[row : row + step]
            x = self._room(x, 0).copy_(x) if copy else x
            pieces.append(self.piece(x, first + row, low))
        return stack(pieces)

    def _room(self, x: torch.Tensor, which: int) -> torch.Tensor:
        """Room for float32 numbers in the shape of ``x``, the same each time."""
        if self.room is None or self.room.shape[1] < x.numel():
            self.room = x.new_empty((2, x.numel()), dtype=torch.float32)
        return self.room[which, : x.numel()].view(x.shape)

    def run(
        self, product: Product, rows: int, size: int, whole: bool, owned: bool,
        fixed: int | None = None,
    ) -> Partial:  # fmt: skip
        """Go through all rows and the vocabulary; ``whole`` forbids to cut the latter, ``fixed``
        says how wide the cuts are."""
        columns = TILE_BYTES // 4
        wide = size if whole else fixed
        most = max(1, columns // wide) if wide else MOST_ROWS
        height = ceil(rows / ceil(rows / most)) if rows else 1  # even shares
        width = size if whole else fixed or max(1, columns // height)
        done = []
        for first in range(0, max(1, rows), height):
            last = min(rows, first + height)
            total: Partial | None = None
            for low in range(0, size, width):
                logits = product(first, last, low, min(size, low + width))
                part = self.tile(logits, first, self.first_id + low, owned)
                total = part if total is None else merge(total, part, self.options)
            assert total is not None
            done.append(total)
        return stack(done)


def token_statistics(
    hidden: torch.Tensor,
    head: Head,
    options: Options,
    inputs: Inputs,
) -> TokenStatistics:
    """As `dllm.kernels.statistics.token_statistics`."""
    call, vocab_size = Call(options, inputs), inputs.vocab_size
    if isinstance(head, QuantisedLinear) and (parts := head.parts()) is not None:
        size = head.out_features if vocab_size is None else min(vocab_size, head.out_features)
        tiles = _packed(hidden.to(head.scale.dtype), parts, head.bias)
        return finish(call.run(tiles, len(hidden), size, options.filtered, True, ROWS), options)
    linear = plain_linear(head)
    if linear is not None:
        weight, bias = linear
        packed = packed_of(head) if vocab_size is None else None
        bias = None if bias is None else bias[:vocab_size]
        return finish(linear_partial(call, hidden, weight[:vocab_size], bias, packed), options)
    size = vocabulary(head, hidden)
    size = size if vocab_size is None else min(size, vocab_size)
    call_head: Product = lambda a, b, low, high: full_logits(hidden[a:b], head)[:, low:high]  # noqa: E731
    return finish(call.run(call_head, len(hidden), size, True, False), options)


def linear_partial(
    call: Call, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    packed: Packed | None = None,
) -> Partial:  # fmt: skip
    """What a weight (V, d), or the share of it that begins with id ``call.first_id``, says."""
    rows, size, options = hidden.shape[0], weight.shape[0], call.options
    hidden = hidden.to(weight.dtype)
    parts = None if packed is None else packed.parts(weight)
    if parts is not None:
        return call.run(_packed(hidden, parts, bias), rows, size, options.filtered, True, ROWS)
    if rows * size <= PIECE:
        logits = torch.nn.functional.linear(hidden, weight, bias).float()
        return call.piece(logits, 0, call.first_id)
    return call.run(_tiled(hidden, weight, bias), rows, size, options.filtered, True)


def _tiled(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Products of a part of the weight, written to one buffer that each call overwrites."""
    buffer = weight.new_empty(0)

    def product(first: int, last: int, low: int, high: int) -> torch.Tensor:
        nonlocal buffer
        shape = (last - first, high - low)
        if buffer.numel() < shape[0] * shape[1]:
            buffer = weight.new_empty(shape[0] * shape[1])
        out = buffer[: shape[0] * shape[1]].view(shape)
        matrix = weight[low:high].T
        if bias is None:
            return torch.mm(hidden[first:last], matrix, out=out)
        return torch.addmm(bias[low:high], hidden[first:last], matrix, out=out)

    return product


def _packed(hidden: torch.Tensor, parts: Sequence[Any], bias: torch.Tensor | None) -> Product:
    """Products of parts of a weight that is packed: one of them, or all side by side."""

    def product(first: int, last: int, low: int, high: int) -> torch.Tensor:
        x = hidden[first:last]
        each = [
            product_with(x, parts[at // ROWS], None if bias is None else bias[at : at + ROWS])
            for at in range(low, high, ROWS)
        ]
        joined = each[0] if len(each) == 1 else torch.cat(each, -1)
        return joined[:, : high - low]

    return product


def logits_statistics(
    logits: torch.Tensor,
    options: Options,
    inputs: Inputs,
) -> TokenStatistics:
    """As `dllm.kernels.statistics.logits_statistics`."""
    call, logits = Call(options, inputs), logits[:, : inputs.vocab_size]
    rows, size = logits.shape
    cut: Product = lambda a, b, low, high: logits[a:b, low:high]  # noqa: E731
    return finish(call.run(cut, rows, size, True, False), options)
