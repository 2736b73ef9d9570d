"""Token statistics in plain PyTorch, a tile of logits at a time.

A plain linear head is cut along the vocabulary: the product of a tile is computed in the dtype of
the weight (as the model itself would: half precision accumulates in float32 and rounds the
logits), then reduced in float32, on a CPU in pieces that fit its cache.  Other heads, and
filters, need full rows and are cut along the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import ceil
from typing import Any

import torch

from ..cpu import library
from ..cpu.products import Weight
from ..linear import ROWS, onednn, packed_of
from ..linear import product as product_with
from ..quantised import QuantisedLinear
from .filters import LOWEST, dropped
from .heads import Head, Shaped, full_logits, plain_linear, vocabulary
from .reduce import Partial, compiled, finish, merge, reduce
from .result import Inputs, Options, TokenStatistics, stack

TILE_BYTES = 16 << 20  # logits held at once on a CPU, counted as float32
GPU_TILE_BYTES = 256 << 20  # on others, which smaller tiles do not keep busy
PIECE = 1 << 17  # elements reduced at once: with their exponentials 1 MB, half of a usual L2 cache
MOST_ROWS = 1024  # more rows would make tiles too narrow for an efficient product

Product = Callable[[int, int, int, int], torch.Tensor]  # rows [a, b), ids [low, high) -> logits


class Call:
    """The arguments of one call that differ by row, ready to be cut."""

    def __init__(self, options: Options, inputs: Inputs) -> None:
        banned = inputs.banned
        self.options, self.banned_rows = options, inputs.banned_rows
        self.banned: list[int] = (
            banned.tolist() if isinstance(banned, torch.Tensor) else list(banned or ())
        )
        self.keys, self.select = inputs.noise_keys, inputs.select
        self.uniforms, self.embeddings = inputs.uniforms, inputs.embeddings
        self.lowered = inputs.lowered
        self.shape: Callable[[torch.Tensor], torch.Tensor] | None = None  # see `Shaped`
        if options.inverse:
            self.keys = None
        self.room: torch.Tensor | None = None  # fresh memory would not be in the cache

    def piece(self, x: torch.Tensor, first: int, low: int) -> Partial:
        """Reduce ``x`` (r, n) float32, rows from ``first`` and ids from ``low`` on; destroys x."""
        last = first + x.shape[0]
        self._ban(x, first, low)
        keys = None if self.keys is None else self.keys[first:last]
        select = None if self.select is None else self.select[first:last]
        room = self._room(x, 1) if "entropy" in self.options.needs else None
        return reduce(x, low, self.options, keys, select, room)

    def _lower(self, x: torch.Tensor, first: int, low: int) -> None:
        """Lower one logit per row of ``x`` (r, n)."""
        if self.lowered is not None:
            ids, amount = self.lowered
            at = ids[first : first + len(x), None].to(x.device) - low
            here = (at >= 0) & (at < x.shape[1])
            x.scatter_add_(1, at.clamp(0, x.shape[1] - 1), here.to(x.dtype) * -amount)

    def _ban(self, x: torch.Tensor, first: int, low: int) -> None:
        for j, token in enumerate(self.banned):
            if low <= token < low + x.shape[1]:
                column = x.select(1, token - low)
                if self.banned_rows is None:
                    column.fill_(-torch.inf)
                else:
                    column.masked_fill_(self.banned_rows[first : first + len(x), j], -torch.inf)

    def tile(self, logits: torch.Tensor, first: int, low: int, owned: bool, walk: Walk) -> Partial:
        """Reduce logits (r, n) of any dtype; they may be destroyed if ``owned``."""
        options, expects = self.options, self.embeddings is not None
        more = options.filtered or options.top > 1 or options.classes is not None or options.warm
        plain = owned and self.keys is None and self.select is None and not more
        fits = plain and (not expects or logits.dtype == torch.float32)
        if fits and library() is not None:
            self._ban(logits, first, low)
            part = compiled(logits, options, expects)
            if part is not None:
                if expects:
                    walk.expect(logits, part.best, 1 + part.rest, low)
                part.index += low
                if options.top:
                    part.top_value, part.top_index = part.best, part.index
                return part
        if expects:
            x = logits.to(torch.float32, copy=True)
            self._ban(x, first, low)
            best = x.amax(1, keepdim=True).clamp_(min=LOWEST)
            x.sub_(best).exp_()
            walk.expect(x, best, x.sum(1, keepdim=True), low)
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
        self, make: Callable[[torch.Tensor], Product], hidden: torch.Tensor, size: int, whole: bool,
        owned: bool, fixed: int | None = None,
    ) -> Partial:  # fmt: skip
        """Go through all rows and the vocabulary; ``whole`` forbids to cut the latter, ``fixed``
        says how wide the cuts are.  ``make`` gives the products of hidden rows."""
        product, rows = make(hidden), len(hidden)
        columns = (TILE_BYTES if hidden.device.type == "cpu" else GPU_TILE_BYTES) // 4
        wide = size if whole else fixed
        most = max(1, columns // wide) if wide else MOST_ROWS
        height = ceil(rows / ceil(rows / most)) if rows else 1  # even shares
        width = size if whole else fixed or max(1, columns // height)
        done = []
        for first in range(0, max(1, rows), height):
            last = min(rows, first + height)
            total: Partial | None = None
            walk = Walk(self, first, last)
            for low in range(0, size, width):
                logits, own = product(first, last, low, min(size, low + width)), owned
                if self.shape is not None:
                    mine = owned and logits.dtype == torch.float32
                    x = logits if mine else logits.to(torch.float32, copy=True)
                    logits, own = self.shape(x), True
                if self.lowered is not None:
                    logits = logits if own else logits.to(torch.float32, copy=True)
                    self._lower(logits, first, low)
                part = self.tile(logits, first, low, own, walk)
                walk.parts.append((low, part))
                total = part if total is None else merge(total, part, self.options)
            assert total is not None
            if walk.sum.numel():
                total.soft = walk.sum / walk.mass
            if self.options.inverse:
                walk.draw(total, make, hidden[first:last], size)
            done.append(total)
        return stack(done)

    def processed(self, x: torch.Tensor, rows: torch.Tensor, low: int) -> torch.Tensor:
        """Logits (r, n) of any dtype as what draws are from: float32, bent, banned, filtered."""
        x, options = x.to(torch.float32, copy=True), self.options
        x = x if self.shape is None else self.shape(x)
        lowered = None if self.lowered is None else (self.lowered[0][rows], self.lowered[1])
        banned_rows = None if self.banned_rows is None else self.banned_rows[rows]
        some = Call(options, Inputs(self.banned, banned_rows, lowered=lowered))
        some._lower(x, 0, low)
        some._ban(x, 0, low)
        if options.filtered:
            x.masked_fill_(dropped(x, options.filters), -torch.inf)
        return x


def _expected(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``weight`` (r, n) times ``rows`` (n, d), on a CPU summed alike however many there are: by
    oneDNN in float32, in eights in half precision."""
    if rows.device.type != "cpu" or not onednn():
        return weight @ rows
    if rows.dtype == torch.float32:
        return product_with(weight, rows.T, None)
    return (torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 8)) @ rows)[: len(weight)]


class Walk:
    """What a walk of rows ``[first, last)`` over the vocabulary carries beside the statistics: the
    running sum of embeddings, rescaled to the largest logit so far as in flash attention, and what
    each tile weighs, by which draws find their tile."""

    def __init__(self, call: Call, first: int, last: int) -> None:
        self.call, self.first, self.last = call, first, last
        self.parts: list[tuple[int, Partial]] = []
        self.best = self.mass = self.sum = torch.zeros(0)

    def expect(
        self, weight: torch.Tensor, best: torch.Tensor, mass: torch.Tensor, low: int
    ) -> None:
        """Add the embeddings of a tile by ``weight`` (r, n) = exp(x - ``best``), which sums up to
        ``mass``."""
        assert self.call.embeddings is not None
        rows = self.call.embeddings(low, low + weight.shape[1])
        best = best.clamp(min=LOWEST)
        if not low:
            self.best, self.mass = best, torch.zeros_like(best)
            self.sum = weight.new_zeros(len(weight), rows.shape[1])
        high = torch.maximum(best, self.best)
        now, before = torch.exp(best - high), torch.exp(self.best - high)
        self.best, self.mass = high, self.mass * before + mass * now
        self.sum.mul_(before).addcmul_(_expected(weight.to(rows.dtype), rows).float(), now)

    def draw(
        self, total: Partial, make: Callable[[torch.Tensor], Product], hidden: torch.Tensor,
        size: int,
    ) -> None:  # fmt: skip
        """Add to the statistics ``total`` of all tiles of ``hidden`` (r, d) the first ids whose
        cumulative weight exceeds a share of all of it: which tile that lies in is known from the
        walk, and only there logits are computed again."""
        options, uniforms = self.call.options, self.call.uniforms
        assert uniforms is not None
        weights = []
        for _, part in self.parts:
            rest = part.warm if options.warm else part.rest
            assert rest is not None
            there = ((part.best - total.best.clamp(min=LOWEST)) / options.temperature).double()
            weights.append(there.exp() * (1 + rest.double()))
        share = uniforms[self.first : self.last, None].to(total.best.device).double()
        whole, floor = torch.cat(weights, 1), options.floor
        mass = whole.sum(1, keepdim=True)
        lows = [low for low, _ in self.parts]
        free = torch.ones_like(whole)  # ids of each tile that bans leave
        if floor and len(lows) > 1:
            free = torch.cat([self._free(*tile) for tile in pairwise([*lows, size])], 1)
        everything = free.sum(1, keepdim=True)
        sums = ((1 - floor) * whole / mass + floor * free / everything).cumsum(1)
        share = share * sums[:, -1:]
        tile = (sums <= share).sum(1).clamp(max=len(self.parts) - 1)
        left = share - torch.nn.functional.pad(sums, (1, 0)).gather(1, tile[:, None])
        total.drawn, total.drawn_logit = torch.zeros_like(total.index), total.best.clone()
        total.noisy = total.best
        for number in sorted({*tile.tolist()}):
            low = lows[number]
            high = lows[number + 1] if number + 1 < len(lows) else size
            rows = (tile == number).nonzero().flatten()
            each = make(hidden[rows])(0, len(rows), low, high)
            x = self.call.processed(each, rows + self.first, low)
            best = total.best[rows].clamp(min=LOWEST)
            p = ((x - best) / options.temperature).double().exp()
            scale, even, possible = mass[rows], everything[rows], x > -torch.inf
            if len(lows) == 1:  # of what filters leave
                scale, even = p.sum(1, keepdim=True), possible.sum(1, keepdim=True)
            p = (1 - floor) * p / scale + floor * possible / even
            at = (p.cumsum(1) <= left[rows]).sum(1, keepdim=True)
            last = x.shape[1] - 1 - (p > 0).flip(1).to(torch.int8).argmax(1, keepdim=True)
            at = torch.minimum(at, last)
            total.drawn[rows] = at + low
            total.drawn_logit[rows] = x.gather(1, at)

    def _free(self, low: int, high: int) -> torch.Tensor:
        """(r, 1) how many ids in [low, high) are not banned."""
        x = self.mass.new_zeros(self.last - self.first, high - low)
        self.call._ban(x, self.first, low)
        return x.isfinite().sum(1, keepdim=True)


def token_statistics(
    hidden: torch.Tensor, head: Head, options: Options, inputs: Inputs
) -> TokenStatistics:
    """As `dllm.kernels.statistics.token_statistics`."""
    call, vocab_size = Call(options, inputs), inputs.vocab_size
    if isinstance(head, Shaped):
        call.shape, head = head.shape, head.head
    if isinstance(head, QuantisedLinear) and head.bare and (parts := head.parts()) is not None:
        size = head.out_features if vocab_size is None else min(vocab_size, head.out_features)
        tiles = partial(_packed, parts=parts, bias=head.bias)
        hidden = hidden.to(head.scale.dtype)
        return finish(call.run(tiles, hidden, size, options.filtered, True, ROWS), options)
    linear = plain_linear(head)
    if linear is None:
        size = vocabulary(head, hidden)
        size = size if vocab_size is None else min(size, vocab_size)
        return finish(call.run(partial(_called, head=head), hidden, size, True, False), options)
    packed = packed_of(head) if vocab_size is None else None
    weight, bias = linear[0][:vocab_size], None if linear[1] is None else linear[1][:vocab_size]
    size, hidden = len(weight), hidden.to(weight.dtype)
    if packed is not None and (parts := packed.parts(weight)) is not None:
        make = partial(_packed, parts=parts, bias=bias)
        return finish(call.run(make, hidden, size, options.filtered, True, ROWS), options)
    carries = options.inverse or call.embeddings is not None or call.lowered is not None
    if len(hidden) * size <= PIECE and not carries:
        logits = torch.nn.functional.linear(hidden, weight, bias).float()
        logits = logits if call.shape is None else call.shape(logits)
        return finish(call.piece(logits, 0, 0), options)
    make = partial(_tiled, weight=weight, bias=bias)
    return finish(call.run(make, hidden, size, options.filtered, True), options)


def _called(hidden: torch.Tensor, head: Head) -> Product:
    """Products of a head that has to be called: of whole rows."""
    return lambda first, last, low, high: full_logits(hidden[first:last], head)[:, low:high]


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
    """Products of parts of a weight that is packed: one of them, in the same memory each time, as
    small pieces of what is freed would keep it from being used again; or all side by side."""
    room: torch.Tensor | None = None

    def product(first: int, last: int, low: int, high: int) -> torch.Tensor:
        nonlocal room
        x, each = hidden[first:last], []
        for at in range(low, high, ROWS):
            part, own = parts[at // ROWS], None if bias is None else bias[at : at + ROWS]
            if isinstance(part, Weight) and high - low <= ROWS:
                if room is None or room.numel() < len(x) * ROWS:
                    room = x.new_empty(len(x) * ROWS)
                each.append(part.multiply(x, own, room))
            else:
                each.append(product_with(x, part, own))
        return (each[0] if len(each) == 1 else torch.cat(each, -1))[:, : high - low]

    return product


def logits_statistics(logits: torch.Tensor, options: Options, inputs: Inputs) -> TokenStatistics:
    """As `dllm.kernels.statistics.logits_statistics`."""
    call, logits = Call(options, inputs), logits[:, : inputs.vocab_size]
    return finish(call.run(_cut, logits, logits.shape[1], True, False), options)


def _cut(logits: torch.Tensor) -> Product:
    return lambda first, last, low, high: logits[first:last, low:high]
