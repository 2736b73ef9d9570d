"""The key/value buffer: a pool of slots for the keys and values of all rows.

One dense tensor per layer, (1, kv_heads, slots, head_dim).  A row owns a range of slots from the
moment it is admitted until it leaves: per lane one slot per position of its canvas, in the order of
the text, stored after rotation.  Rows of different lengths lie end to end without padding, and what
a finished row gives back is handed to the next.  A step writes what it computes, in place.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import Cache

from ..kernels.rotation import rotate_scatter
from .extents import Extents


class KVBuffer(Cache):
    """Room for ``size`` positions in each of ``layers``; tensors appear at the first write.

    Where ``most`` exceeds ``size``, `allocate` makes room by doubling, at the cost of a copy, up to
    ``most`` positions.  Set `slots` (int64, one per packed query) before each forward.
    """

    def __init__(self, layers: int, size: int, most: int | None = None) -> None:
        super().__init__(layers=[])
        self.extents = Extents(size)
        self.most = size if most is None else max(size, most)
        self.slots: torch.Tensor | None = None
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self._kept: list[torch.Tensor | None] = [None] * layers

    @property
    def size(self) -> int:
        """Slots per layer."""
        return self.extents.size

    @property
    def complete(self) -> bool:
        """Whether every layer has been written once: its memory is taken."""
        return all(keys is not None for keys in self._keys)

    def allocate(self, n: int) -> int | None:
        """The first of ``n`` slots in a row for a new owner; None when there is no room now."""
        base = self.extents.allocate(n)
        while base is None and self.size < self.most:
            self._grow(min(self.most, max(2 * self.size, self.size + n)))
            base = self.extents.allocate(n)
        return base

    def free(self, base: int, n: int) -> None:
        """Give ``n`` slots from ``base`` on back.  What they hold is not cleared."""
        self.extents.free(base, n)

    @torch.inference_mode()
    def clear(self, base: int, n: int) -> None:
        for held in (*self._keys, *self._values):
            if held is not None:
                held.narrow(2, base, n).zero_()

    @torch.inference_mode()
    def enlarge(self, base: int, n: int, size: int, lanes: int = 1) -> int | None:
        """Give an owner of ``lanes`` ranges of ``n`` slots, one after the other from ``base`` on,
        ``size`` slots in each; their contents are moved, bit for bit.  The first slot, or None
        when there is no room now, and then nothing has changed."""
        if lanes == 1 and self.extents.extend(base, n, size):
            return base
        new = self.extents.reallocate(base, lanes * n, lanes * size)
        if new is None:
            new = self.allocate(lanes * size)
            if new is None:
                return None
            self.free(base, lanes * n)
        for x in (*self._keys, *self._values, *self._kept):
            if x is None:
                continue
            old = x.narrow(-2, base, lanes * n).clone()  # the ranges may overlap
            for lane in range(lanes):
                x.narrow(-2, new + lane * size, n).copy_(old.narrow(-2, lane * n, n))
        return new

    @torch.inference_mode()
    def _grow(self, size: int) -> None:
        """More slots: every tensor is copied into a larger one.  All new ones are made
        before any is put in place: running out of memory leaves the buffer as it was."""
        more = (0, 0, 0, size - self.size)
        grown = [
            [None if x is None else nn.functional.pad(x, more) for x in held]
            for held in (self._keys, self._values, self._kept)
        ]
        self._keys, self._values, self._kept = grown
        self.extents.grow(size)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int,
        *_: Any, **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Write rotated (1, kv_heads, Q, head_dim) at `slots`; return the layer's whole buffer."""
        keys, values, slots = self.place(layer_idx, value_states)
        keys.index_copy_(2, slots, key_states.to(keys.dtype))
        values.index_copy_(2, slots, value_states)
        return keys, values

    def rotate_scatter(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor,
        sin: torch.Tensor, layer_idx: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Rotate ``q`` (1, H, Q, dh) and ``k``, write k and ``v`` (1, Hkv, Q, dh) at `slots`.

        ``cos``, ``sin`` (1, Q, dh).  Returns the rotated queries and the layer's whole buffer.
        """
        keys, values, slots = self.place(layer_idx, v)
        q = rotate_scatter(q[0], k[0], v[0], cos[0], sin[0], slots, keys[0], values[0])
        return q[None], keys, values

    def place(
        self, layer_idx: int, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, made to fit ``states`` (1, Hkv, any, dh), and `slots` on
        their device, for who writes there."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if keys is None or values is None:
            shape = list(states.shape)
            shape[2] = self.extents.size
            keys = states.new_zeros(shape)
            values = torch.zeros_like(keys)
            self._keys[layer_idx], self._values[layer_idx] = keys, values
        assert self.slots is not None, "slots are set before the forward"
        return keys, values, self.slots.to(keys.device)

    @torch.inference_mode()
    def copy(self, base: int, others: Iterable[int], positions: torch.Tensor) -> None:
        """Give lanes that begin at ``others`` what the one at ``base`` holds at ``positions``."""
        for held in (*self._keys, *self._values):
            if held is not None:
                at = positions.to(held.device)
                for other in others:
                    held[:, :, other + at] = held[:, :, base + at]

    @torch.inference_mode()
    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy what slots ``source`` (n,) hold to slots ``target`` (n,); they may overlap."""
        for held in (*self._keys, *self._values):
            if held is not None:
                held[:, :, target.to(held.device)] = held[:, :, source.to(held.device)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are explicit in every step: nothing is ever appended."""
        return 0

    def values(self, layer_idx: int) -> torch.Tensor:
        """The values of a computed layer, (1, kv_heads, slots, head_dim)."""
        values = self._values[layer_idx]
        assert values is not None, "the layer has been computed"
        return values

    def keep(self, layer_idx: int, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Remember hidden ``states`` (n, D) of a layer at ``slots`` (n,)."""
        kept = self._kept[layer_idx]
        if kept is None:
            kept = states.new_zeros(self.size, states.shape[-1])
            self._kept[layer_idx] = kept
        kept[slots] = states

    def kept(self, layer_idx: int, slots: torch.Tensor) -> torch.Tensor:
        """What `keep` remembers at ``slots``, (n, D)."""
        kept = self._kept[layer_idx]
        assert kept is not None, "the layer has been computed"
        return kept[slots]

    @property
    def nbytes(self) -> int:
        """Bytes held in all layers: keys, values, and hidden states where a cache keeps them."""
        held = (*self._keys, *self._values, *self._kept)
        return sum([x.nbytes for x in held if x is not None])


class Scratch(KVBuffer):
    """Keys and values of ``count`` queries that attend to one another and are not kept: each layer
    writes over those of the one before."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__(1, count)
        self.slots = torch.arange(count, device=device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int,
        *_: Any, **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """As they are."""
        return key_states, value_states

    def place(
        self, layer_idx: int, states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `KVBuffer.place`, on the device of the layer."""
        if self._keys[0] is not None and self._keys[0].device != states.device:
            self._keys, self._values = [None], [None]
        return super().place(0, states)
