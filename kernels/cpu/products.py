"""Weights laid out for the compiled products (`products.cpp`, `products4.cpp`), in their parts.

Each class stands for a weight (n, d) and has the methods of the parts in `dllm.kernels.quantised`.
Rows are of float32 or bfloat16, and so are results; of whole numbers in other dtypes by float32.
"""

from typing import NamedTuple

import torch
from torch import nn

from .compiled import loaded

GROUPS = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}  # inputs per instruction


class Rounded(NamedTuple):
    """Rows in whole numbers: ``numbers`` (m, d) one byte each, ``scale`` (m, groups) float32 and,
    where weights have zeros, ``sums`` (m, groups): scale times the sum of a group's numbers."""

    numbers: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor | None = None


def suits(weight: torch.Tensor) -> bool:
    """Whether `Weight` can be made of a dense ``weight`` (..., n, d) of float32 or bfloat16."""
    return weight.shape[-1] % GROUPS[weight.dtype] == 0


class Weight:
    """A weight (n, d) of float32 or bfloat16; ``copy`` False: as it lies, laid out in every
    product: the same numbers, more slowly for few rows."""

    def __init__(self, weight: torch.Tensor, copy: bool = True) -> None:
        self.shape, self.copy = weight.shape, copy
        self.blocks = _blocks(weight) if copy else weight

    def multiply(
        self, x: torch.Tensor, bias: torch.Tensor | None, room: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` (m, d) in the dtype of the weight, plus ``bias`` (n,): (m, n), in ``room`` if it is
        given, which has at least as many numbers."""
        x, shape = x.contiguous(), (len(x), self.shape[0])
        result = x.new_empty(shape) if room is None else room[: shape[0] * shape[1]].view(shape)
        bias = None if bias is None else bias.contiguous()
        loaded().dllm_product(
            x.data_ptr(), self.blocks.data_ptr(), not self.copy,
            None if bias is None else bias.data_ptr(), result.data_ptr(), len(x), *self.shape,
            x.dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return result


class Weight8:
    """A weight (n, d) of whole numbers of 8 bits, ``numbers`` times ``scale`` (n, 1)."""

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.shape = numbers.shape
        self.blocks = _blocks(numbers)
        self.total = numbers.sum(1, dtype=torch.int32)
        self.scale = scale.reshape(-1).float().contiguous()

    def rounded(self, x: torch.Tensor) -> Rounded:
        """``x`` (..., d) as `multiply_rounded` wants it."""
        return _rounded(x, self.shape[1], 128)

    def multiply_rounded(self, x: Rounded, dtype: torch.dtype) -> torch.Tensor:
        """(m, n) in ``dtype``."""
        result = _room(len(x.numbers), self.shape[0], dtype)
        loaded().dllm_product8(
            x.numbers.data_ptr(), x.scale.data_ptr(), self.blocks.data_ptr(),
            self.scale.data_ptr(), self.total.data_ptr(), None, result.data_ptr(),
            len(x.numbers), *self.shape, dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return result.to(dtype)

    def unpacked(self) -> torch.Tensor:
        """The numbers (n, d)."""
        return _rows(self.blocks, self.shape[0]).view(torch.int8)


class Weight4:
    """A weight (n, d) of whole numbers of 4 bits, ``numbers`` (n, d / 2) with two of them each, the
    even ones in the lower halves: less 8, times ``scale`` plus ``zero``, both (n, groups)."""

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> None:
        self.shape = torch.Size((len(numbers), 2 * numbers.shape[1]))
        self.group = self.shape[1] // scale.shape[1]
        self.blocks = _blocks(numbers)
        missing = 0, 0, 0, -len(numbers) % _block()  # up to a whole block
        self.scale, self.zero = (
            nn.functional.pad(each.bfloat16(), missing)
            .reshape(-1, _block(), each.shape[1])
            .transpose(1, 2)
            .contiguous()
            for each in (scale, zero)
        )

    def rounded(self, x: torch.Tensor) -> Rounded:
        """``x`` (..., d) as `multiply_rounded` wants it."""
        return _rounded(x, self.group, 0)

    def multiply_rounded(self, x: Rounded, dtype: torch.dtype) -> torch.Tensor:
        """(m, n) in ``dtype``."""
        assert x.sums is not None
        result = _room(len(x.numbers), self.shape[0], dtype)
        loaded().dllm_product4(
            x.numbers.data_ptr(), x.scale.data_ptr(), x.sums.data_ptr(), self.blocks.data_ptr(),
            self.scale.data_ptr(), self.zero.data_ptr(), result.data_ptr(), len(x.numbers),
            *self.shape, self.group, dtype == torch.bfloat16, torch.get_num_threads(),
        )  # fmt: skip
        return result.to(dtype)

    def unpacked(self) -> torch.Tensor:
        """The numbers (n, d / 2)."""
        return _rows(self.blocks, self.shape[0]).view(torch.uint8)


def _room(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """For results that become ``dtype``."""
    return torch.empty(count, width, dtype=dtype if dtype == torch.bfloat16 else torch.float32)


def _rounded(x: torch.Tensor, group: int, zero: int) -> Rounded:
    """``x`` (..., d) in whole numbers from -127 to 127 plus ``zero``, a scale per ``group``."""
    x = x.reshape(-1, x.shape[-1]).contiguous()
    x = x if x.dtype == torch.bfloat16 else x.float()
    numbers = x.new_empty(x.shape, dtype=torch.uint8)
    scale = x.new_empty(len(x), x.shape[1] // group, dtype=torch.float32)
    sums = None if zero else torch.empty_like(scale)
    loaded().dllm_round(
        x.data_ptr(), numbers.data_ptr(), scale.data_ptr(),
        None if sums is None else sums.data_ptr(), *x.shape, group, zero,
        x.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return Rounded(numbers, scale, sums)


def _block() -> int:
    """Outputs that lie together."""
    return int(loaded().dllm_block())


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` (n, d), of which an instruction sums 32 bits of each row, in blocks
    (n / block, d / group, block) int32."""
    words = weight.contiguous().view(torch.int32)
    count, wide = words.shape
    blocks = words.new_empty(-(-count // _block()), wide, _block())
    threads = torch.get_num_threads()
    loaded().dllm_lay_out(words.data_ptr(), blocks.data_ptr(), count, wide, threads)
    return blocks


def _rows(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """The weight of which these are the blocks, (n, d / group) int32."""
    return blocks.transpose(1, 2).reshape(-1, blocks.shape[1])[:count].contiguous()
