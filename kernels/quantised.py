"""Linear layers whose weights are whole numbers of 8 or 4 bits, on a CPU.

    8 bits  w = q * scale                one scale per output row, q from -127 to 127
    4 bits  w = (q - 8) * scale + zero   a scale and a zero per row and group of inputs, q 0 to 15

Scales are rounded to bfloat16, so that a file, a cast and a kernel all mean the same weight.
How a product is computed is decided at the first one, by trying:

``int8``  oneDNN multiplies whole numbers where it does so exactly (processors with VNNI or AMX).
          Each input row is rounded to 8 bits with a scale of its own.  Sums are whole numbers, so
          a row does not depend on the others.  Elsewhere PyTorch's weight-only kernel, by way of
          bfloat16.
``int4``  PyTorch's weight-only kernel in bfloat16: a quarter of the memory; slower than bfloat16
          weights for more than about eight rows, because every weight is restored per few rows.

Compiled kernels (`dllm.kernels.cpu`), where there are some, come before both: for 8 bits with the
same bits as oneDNN, for 4 bits with inputs rounded to 8 bits, a scale for each group of them.

Off the CPU, and for gradients, the weight is restored and multiplied as ever: the slow twin.
"""

import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from operator import attrgetter, is_
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .cpu import library
from .cpu.layers import DTYPES, Groups
from .cpu.products import Rounded, Weight4, Weight8
from .experts import apart, mixed
from .linear import ROWS, onednn, product
from .mapped import release

GROUPS = (32, 64, 128)  # inputs that share a scale, of 4-bit weights
EVEN = 32  # inputs are a multiple of this: kernels read that many at once
BLOCK = 16  # outputs of a 4-bit weight are a multiple of this
MOST_INPUTS = (2**31 - 1) // (255 * 128)  # whose products of 8-bit numbers 32 bits can sum
CUT = 2**20  # numbers that are rounded at a time
_LOCK = threading.Lock()
GROUPED: WeakKeyDictionary[nn.Module, tuple[Any, Groups | None]] = WeakKeyDictionary()


@cache
def whole_products() -> bool:
    """Whether oneDNN multiplies 8-bit numbers exactly here; without VNNI sums may overflow."""
    if not onednn() or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    x = torch.full((4, 64), 255, dtype=torch.uint8)
    weight = torch.full((32, 64), 127, dtype=torch.int8)
    weight[::2] = -127
    try:
        result = Int8(weight, torch.ones(32, 1)).multiply(x)
    except RuntimeError:
        return False
    return torch.equal(result, (x.float() - 128) @ weight.float().T)


def quantise(weight: torch.Tensor, bits: int, group: int = 0) -> dict[str, torch.Tensor]:
    """``weight`` (n, d) as buffers of a `QuantisedLinear`: ``numbers``, ``scale`` and, for 4 bits,
    ``zero``; to the nearest number, without calibration."""
    w = weight.detach().float()
    if bits == 8:
        most = w.abs().amax(1, keepdim=True)
        scale = _bfloat16(most / 127 * (1 + 2**-8)).clamp_min(1e-30)  # rounded up
        numbers = (w / scale).round_().clamp_(-127, 127).to(torch.int8)
        return {"numbers": numbers, "scale": scale}
    w = w.view(len(w), -1, group)
    low, high = w.amin(2), w.amax(2)
    scale = _bfloat16((high - low) / 15).clamp_min(1e-30)
    zero = _bfloat16(low + 8 * scale)
    numbers = ((w - zero[..., None]) / scale[..., None]).round_().add_(8).clamp_(0, 15)
    return {"numbers": halves(numbers.to(torch.uint8).flatten(1)), "scale": scale, "zero": zero}


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def halves(numbers: torch.Tensor) -> torch.Tensor:
    """(n, d) numbers of 4 bits as (n, d / 2) bytes, the even ones in the lower half."""
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def whole(numbers: torch.Tensor) -> torch.Tensor:
    """The inverse of `halves`."""
    return torch.stack((numbers & 15, numbers >> 4), 2).flatten(1)


class Int8:
    """A weight (n, d) of 8-bit numbers, laid out for the kernel that multiplies by it."""

    rows_matter = True  # oneDNN prepares itself for each number of rows

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.shape = numbers.shape
        self.scale = scale.reshape(-1).float()
        self.zeros = torch.zeros(len(numbers), dtype=torch.int32)
        self.numbers: Any = torch.ops.onednn.qlinear_prepack(numbers.contiguous(), None)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``x`` (m, d) of bytes, 128 for zero: (m, n) float32, without the scales of rows."""
        result: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            x, 1.0, 128, self.numbers, self.scale, self.zeros, None, 1.0, 0, torch.float32,
            "none", [], "",
        )  # fmt: skip
        return result

    def multiply_rounded(self, x: Rounded, dtype: torch.dtype) -> torch.Tensor:
        """(m, n) in ``dtype``."""
        return product(x.numbers, self, None).mul_(x.scale).to(dtype)

    def rounded(self, x: torch.Tensor) -> Rounded:
        """``x`` (..., d) in bytes, 128 for zero, with a scale for each row."""
        wide = x.reshape(-1, x.shape[-1]).float()
        scale = wide.abs().amax(-1, keepdim=True).div_(127).clamp_min_(1e-30)
        # Beside 2^23 a float32 number has no place for fractions: the sum is rounded, to even, and
        # the last byte of its bits is the whole number.
        numbers = wide.div(scale).add_(2.0**23 + 128).view(torch.int32).to(torch.uint8)
        return Rounded(numbers, scale)

    def unpacked(self) -> torch.Tensor:
        """The numbers (n, d)."""
        dense: torch.Tensor = self.numbers.to_dense()
        return dense.T.contiguous()


class WeightOnly:
    """A weight (n, d) of 8-bit numbers for PyTorch's kernel that leaves inputs in bfloat16."""

    rows_matter = False

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.shape, self.numbers = numbers.shape, numbers
        self.scale = scale.reshape(-1).bfloat16()

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (m, d) float: (m, n) in its dtype, by way of bfloat16 (many times as fast)."""
        y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x.bfloat16(), self.numbers, self.scale)
        return y.to(x.dtype)

    def unpacked(self) -> torch.Tensor:
        """The numbers (n, d)."""
        return self.numbers


class Int4:
    """A weight (n, d) of 4-bit numbers, laid out for PyTorch's kernel."""

    rows_matter = False

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> None:
        self.shape = torch.Size((len(numbers), 2 * numbers.shape[1]))
        self.group = self.shape[1] // scale.shape[1]
        self.numbers = _pack4(whole(numbers).int())
        self.scales = torch.stack((scale.T, zero.T), 2).bfloat16().contiguous()  # (groups, n, 2)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (m, d) float: (m, n) in its dtype, by way of bfloat16 (30 times as fast)."""
        result: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.bfloat16(), self.numbers, self.group, self.scales
        )
        return result.to(x.dtype)

    def unpacked(self) -> torch.Tensor:
        """The numbers (n, d / 2), in bytes.

        The kernel's layout differs between processors.  It moves numbers and changes none, so
        packing the digits of their places tells where each went.
        """
        places = torch.arange(self.shape.numel(), dtype=torch.int32).view(self.shape)
        moved = torch.zeros(self.shape.numel(), dtype=torch.int64)
        for shift in range(0, self.shape.numel().bit_length(), 4):
            moved |= whole(_pack4(places >> shift & 15)).flatten().long() << shift
        result = torch.empty(self.shape.numel(), dtype=torch.uint8)
        result[moved] = whole(self.numbers).flatten()
        return halves(result.view(self.shape))


def _pack4(numbers: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, 1)
    return packed


class QuantisedLinear(nn.Module):
    """A linear layer (``inputs`` to ``outputs``) with weights of 8 or 4 ``bits``.

    Buffers, until the first product lays them out for the processor, and in every ``state_dict``:
    ``numbers`` (outputs, inputs) int8, or (outputs, inputs / 2) uint8 with two of 4 bits each;
    ``scale`` (outputs, 1 or groups) and, for 4 bits, ``zero`` of the same shape.  What is written
    into them after that by other ways than `load_state_dict` is not seen.
    """

    numbers: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None

    def __init__(
        self, inputs: int, outputs: int, bits: int, group: int = 0, bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.bits, self.group = inputs, outputs, bits, group
        four = bits == 4
        groups = inputs // group if four else 1
        kind = torch.uint8 if four else torch.int8
        self.register_buffer("numbers", torch.empty(outputs, inputs * bits // 8, dtype=kind))
        self.register_buffer("scale", torch.empty(outputs, groups, dtype=dtype))
        self.register_buffer("zero", torch.empty(outputs, groups, dtype=dtype) if four else None)
        held = torch.empty(outputs, dtype=dtype) if bias else None
        self.bias = None if held is None else nn.Parameter(held, requires_grad=False)
        self.made: list[Any] | None = None

    @classmethod
    def like(cls, layer: nn.Linear, bits: int, group: int, dtype: torch.dtype) -> Self:
        """One of the size of ``layer``, without numbers."""
        outputs, inputs = layer.weight.shape
        with torch.device("meta"):
            return cls(inputs, outputs, bits, group, layer.bias is not None, dtype)

    @classmethod
    def of(cls, layer: nn.Linear, bits: int, group: int = 0) -> Self:
        result = cls.like(layer, bits, group, layer.weight.dtype).filled(layer.weight)
        if layer.bias is not None:
            result.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        return result

    def filled(self, weight: torch.Tensor) -> Self:
        """This layer, ``weight`` rounded by parts: float32 copies in cache are 5 times as fast."""
        pieces = torch.split(weight, max(1, CUT // weight.shape[1]))
        parts = [quantise(piece, self.bits, self.group) for piece in pieces]
        for name in parts[0]:
            value = torch.cat([part[name] for part in parts])
            setattr(self, name, value if name == "numbers" else value.to(weight.dtype))
        return self

    @property
    def weight(self) -> torch.Tensor:
        """(outputs, inputs) in the dtype of the scales: restored at every access."""
        plain = self.plain_numbers()
        if self.zero is None:
            return (plain * self.scale.float()).to(self.scale.dtype)
        groups = whole(plain).view(len(plain), -1, self.group).float() - 8
        restored = groups * self.scale.float()[..., None] + self.zero.float()[..., None]
        return restored.flatten(1).to(self.scale.dtype)

    @property
    def size(self) -> int:
        """How many weights it stands for."""
        return self.in_features * self.out_features

    def plain_numbers(self) -> torch.Tensor:
        """The buffer ``numbers``, wherever they are by now."""
        parts = self.made
        return self.numbers if parts is None else torch.cat([p.unpacked() for p in parts])

    def parts(self) -> list[Any] | None:
        """The weight in parts of `ROWS` outputs; None off the CPU."""
        if self.scale.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        if self.made is None:
            with _LOCK:
                if self.made is None:
                    self.made = self._laid_out()
                    release(self.numbers)
                    self.numbers = self.numbers.new_empty(0)
        return self.made

    def _laid_out(self) -> list[Any]:
        held = [self.numbers, self.scale, *(() if self.zero is None else (self.zero,))]
        kind: Callable[..., Any]
        if self.zero is not None:
            kind = Int4 if library() is None else Weight4
        elif self.in_features > MOST_INPUTS:
            kind = WeightOnly
        else:
            kind = Weight8 if library() is not None else Int8 if whole_products() else WeightOnly
        return [kind(*each) for each in zip(*(torch.split(x, ROWS) for x in held), strict=True)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (..., inputs) to (..., outputs), in its dtype."""
        parts = self.parts()
        if parts is None or x.requires_grad:
            return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)
        each = [product(x, part, None) for part in parts]
        result = each[0] if len(each) == 1 else torch.cat(each, -1)
        return result if self.bias is None else result + self.bias

    @property
    def bare(self) -> bool:
        """Whether nobody has put a hook on it, or another forward."""
        return not (self._forward_hooks or self._forward_pre_hooks or "forward" in self.__dict__)

    def _restore(self) -> None:
        """To be laid out anew at the next product."""
        if self.made is not None:
            self.numbers, self.made = self.plain_numbers(), None

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._restore()  # moved or cast
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any) -> None:
        self._restore()
        super()._load_from_state_dict(*args)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "numbers"] = self.plain_numbers()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state["_buffers"] = {**self._buffers, "numbers": self.plain_numbers()}
        return state | {"made": None}


class QuantisedExperts(nn.Module):
    """Experts whose matrices are `QuantisedLinear`, in the place of transformers' 3-d tensors."""

    def __init__(self, experts: Any, bits: int, group: int = 0) -> None:
        """Of the sizes of ``experts``, without numbers."""
        super().__init__()
        self.act_fn = experts.act_fn
        self.gate_up_proj, self.down_proj = (
            nn.ModuleList(QuantisedLinear.like(one, bits, group, one.weight.dtype) for one in each)
            for each in (_linears(experts.gate_up_proj), _linears(experts.down_proj))
        )

    @classmethod
    def of(cls, experts: Any, bits: int, group: int = 0) -> Self:
        result = cls(experts, bits, group)
        for name in ("gate_up_proj", "down_proj"):
            for layer, weight in zip(getattr(result, name), getattr(experts, name), strict=True):
                layer.filled(weight)
        return result

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(n, d): for each row of ``x`` (n, d) the sum over its ``chosen`` (n, k) experts, times
        their ``weights`` (n, k)."""
        up, down = partial(_chosen, self.gate_up_proj), partial(_chosen, self.down_proj)
        return mixed(x, chosen, weights, self.act_fn, up, down)


def _chosen(layers: Any, x: torch.Tensor, of: torch.Tensor, each: int) -> torch.Tensor:
    """As `Groups`, by the weights of ``layers``."""
    made, groups = GROUPED.get(layers, ((), None))
    if len(made) != len(layers) or not all(map(is_, made, map(attrgetter("made"), layers))):
        made = [layer.parts() for layer in layers]
        weights = [part for parts in made for part in parts or ()]
        one_kind = {*map(type, weights)} in ({Weight8}, {Weight4}) and len(weights) == len(made)
        groups = Groups(weights) if one_kind else None
        GROUPED[layers] = made, groups
    if groups is None or x.requires_grad or x.dtype not in DTYPES or torch.compiler.is_compiling():
        return apart(x, of, each, lambda i, rows: layers[i](rows))
    return groups(x, of, each)


def _linears(weight: torch.Tensor) -> Iterator[nn.Linear]:
    """``weight`` (experts, outputs, inputs) as a layer each."""
    for one in weight.detach():
        layer = nn.Linear(one.shape[1], one.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(one, requires_grad=False)
        yield layer


class QuantisedEmbedding(QuantisedLinear):
    """Rows of a `QuantisedLinear`'s weight of 8 bits, by their ids."""

    def __init__(self, count: int, size: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(size, count, 8, dtype=dtype)
        self.num_embeddings, self.embedding_dim = count, size

    @classmethod
    def of(cls, layer: nn.Embedding) -> Self:  # type: ignore[override]
        with torch.device("meta"):
            result = cls(*layer.weight.shape)
        return result.filled(layer.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(...) to (..., size)."""
        return (self.numbers[ids] * self.scale[ids].float()).to(self.scale.dtype)
