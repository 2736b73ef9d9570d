"""Which keys the queries of a packed forward attend to."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..kernels.cpu.layers import Part


@dataclass(slots=True, eq=False)
class Segment:
    """Queries that attend the named keys and nothing else: all of them, unless there is a mask.

    ``queries`` is a range of the packed query axis; ``keys`` a range (a view) or a 1-D LongTensor
    (a gather) of the packed key axis.  ``rows > 1`` folds that many rows of equal size into one
    call: they lie back to back in ``queries``, and row ``r`` reads the keys of row 0 moved by
    ``r * key_stride`` slots.  ``mask`` (rows, queries of a row, keys) float is added to the scores;
    flash kernels take none.
    """

    queries: slice
    keys: slice | Tensor
    rows: int = 1
    key_stride: int = 0
    mask: Tensor | None = None
    _folded: Tensor | None = field(default=None, init=False, repr=False)

    def folded(self, heads: int, dtype: torch.dtype) -> Tensor | None:
        """The mask for ``heads`` heads whose queries lie one after the other, (rows, heads x
        queries of a row, keys); the same for every layer, and made once."""
        made, mask = self._folded, self.mask
        if mask is None or (made is not None and made.dtype == dtype
                            and made.shape[1] == heads * mask.shape[1]):  # fmt: skip
            return made
        self._folded = mask.to(dtype).repeat(1, heads, 1)
        return self._folded

    def part(self, heads: int, dtype: torch.dtype) -> Part | None:
        """The segment for layers in one call, with its mask `folded`, which is kept; None where
        they cannot read it."""
        queries, keys, chosen, mask = self.queries, self.keys, None, self.folded(heads, dtype)
        if isinstance(keys, Tensor):
            if keys.dtype != torch.int64 or not keys.is_contiguous():
                return None
            chosen, keys = keys.data_ptr(), slice(0, len(keys))
        count, length = (queries.stop - queries.start) // self.rows, keys.stop - keys.start
        if mask is not None and mask.shape != (self.rows, heads * count, length):
            return None
        return Part(
            queries.start, count, self.rows, keys.start, length, self.key_stride, chosen,
            None if mask is None else mask.data_ptr(),
        )  # fmt: skip

    def rows_of(self, x: Tensor) -> Tensor:
        """Keys or values ``x`` (1, Hkv, S, dh) as (rows, Hkv, n, dh); a view of a range of keys."""
        keys, rows, stride = self.keys, self.rows, self.key_stride
        if isinstance(keys, Tensor):
            offsets = torch.arange(rows, device=x.device) * stride
            return x[0][:, keys.to(x.device) + offsets[:, None]].transpose(0, 1)
        first, last, _ = keys.indices(x.shape[2])
        if rows == 1 or stride == 0:
            return x[:, :, first:last].expand(rows, -1, -1, -1)
        span = x[0, :, first : last + (rows - 1) * stride]
        return span.unfold(1, last - first, stride).permute(1, 0, 3, 2)
