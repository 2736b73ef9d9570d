"""Products with the weights of linear layers on a CPU: by compiled kernels, else by oneDNN.

PyTorch multiplies float32 on a CPU with MKL, which reaches less than half of what oneDNN does on
processors of AMD with AVX-512, and gives oneDNN bfloat16 weights as they lie, to be rearranged in
every call.  `Packed` calls oneDNN for both, or the compiled kernels where there are some
(`dllm.kernels.cpu`), and keeps a copy of the weight in the order that these want.  By oneDNN,
for 8 to 64 rows, those of a decoding step, that is 2 to 3 times as fast in float32 and 1.2 to 1.8
times in bfloat16 (`benchmarks/step.py`).  With AVX2 oneDNN multiplies float32 only.

A row of the result does not depend on how many others there are, to the last bit, whether there is
a copy or not (`tests/kernels/test_linear.py`); PyTorch's own products differ for one to three rows
in float32.  The copy holds the numbers of the weight, so it costs memory, nothing else; and not
even that where the weight is mapped from a file, whose pages can go (`release`).
"""

import platform
from bisect import bisect_left
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from .cpu import library
from .cpu.layers import Groups
from .cpu.products import Weight
from .cpu.products import suits as fits
from .mapped import release

ROWS = 16384  # of a weight that are laid out as one part: what the head's tiles are made of
SIZES = (2, *range(4, 32, 4), *range(32, 128, 8), *range(128, 256, 16), *range(256, 513, 32))
FILLED = [SIZES[bisect_left(SIZES, rows)] for rows in range(SIZES[-1] + 1)]
SAMPLE = 64  # numbers by which `Packed.check` knows a weight


def available() -> bool:
    """Whether `Packed` has what it calls: compiled kernels, or oneDNN's products."""
    return library() is not None or onednn()


@cache
def onednn() -> bool:
    """Whether this build of PyTorch and this processor have oneDNN's products."""
    ops: Any = torch.ops.mkldnn
    return (
        platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch.cpu._is_avx2_supported()
        and hasattr(ops, "_linear_pointwise")
        and hasattr(ops, "_reorder_linear_weight")
    )


@cache
def _native() -> tuple[torch.dtype, ...]:
    """What oneDNN multiplies by itself: bfloat16 with AVX-512 only, unless that is switched off."""
    x = torch.ones(32, 32, dtype=torch.bfloat16)
    try:
        _multiply(x, torch.ops.mkldnn._reorder_linear_weight(x), None)
    except RuntimeError:
        return (torch.float32,)
    return torch.float32, torch.bfloat16


def dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that `Packed` multiplies."""
    return _native() if library() is None else (torch.float32, torch.bfloat16)


def suits(weight: torch.Tensor) -> bool:
    """Whether `Packed` can stand for this weight: plain, in memory, float32 or bfloat16, and nobody
    has set ``torch.backends.mkldnn.enabled`` to False."""
    return (
        available()
        and bool(torch.backends.mkldnn.enabled)
        and type(weight) in (torch.Tensor, nn.Parameter)
        and weight.device.type == "cpu"
        and weight.dtype in dtypes()
        and weight.dim() in (2, 3)
        and weight.is_contiguous()
        and weight.numel() > 0
        and ((library() and fits(weight)) or (onednn() and weight.dtype in _native()))
    )


class Made(NamedTuple):
    """Of a weight: pointer, version and dtype that it is known by; its parts; some of its numbers
    and how far apart they stand; the part where there is one, and oneDNN's."""

    known: tuple[int, int, torch.dtype]
    parts: list[Any]
    sample: tuple[torch.Tensor, int] | None
    alone: torch.Tensor | None


class Packed:
    """What is multiplied with in place of a weight (n, d), or several (k, n, d).

    Made at the first product, and again when the weight has been moved, cast or changed in place.
    A change behind PyTorch's back (``weight.data.add_``) is seen by `check`.  ``copy`` False: the
    weight itself, in parts; slower for few rows, the same numbers, no memory.
    """

    def __init__(self, copy: bool = True, name: str = "weight") -> None:
        self.copy, self.name = copy, name
        self.made: Made | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, (self.copy, self.name)  # a copied model has weights of its own

    def parts(self, weight: torch.Tensor) -> list[Any] | None:
        """The weight in parts of `ROWS` outputs, or several one by one or as `Groups`; None where
        PyTorch has to multiply: for gradients, while compiling, or where it no longer `suits`."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        made = self.made
        if made is None or made.known != known_by(weight):
            if not suits(weight):
                return None
            made = self.made = self._make(weight)
        return made.parts

    def check(self, weight: torch.Tensor) -> None:
        """Forget the copy of a weight that holds other numbers by now, as far as a sample tells."""
        if self.made is not None and self.made.sample is not None:
            known, step = self.made.sample
            if not torch.equal(known, weight.detach().reshape(-1)[::step]):
                self.made = None

    def _make(self, weight: torch.Tensor) -> Made:
        source = weight.detach()
        many = source.dim() == 3
        parts: list[Any] = list(source if many else torch.split(source, ROWS))
        if library() is not None and fits(source):
            parts = [Weight(part, self.copy) for part in parts]
            parts = [Groups(parts)] if many else parts
        elif self.copy:
            parts = [torch.ops.mkldnn._reorder_linear_weight(part) for part in parts]
        alone = parts[0] if len(parts) == 1 and isinstance(parts[0], torch.Tensor) else None
        sample = None
        if self.copy:
            flat = source.reshape(-1)
            step = max(1, len(flat) // SAMPLE)
            sample = flat[::step].clone(), step
            release(source)
        return Made(known_by(weight), parts, sample, alone)


def known_by(weight: torch.Tensor) -> tuple[int, int, torch.dtype]:
    """What differs for another weight, and for this one after a change in place."""
    version = 0 if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype


def pack(module: nn.Linear, copy: bool = True) -> None:
    """Let the layer multiply by `Packed`.  Its weight, bias and ``state_dict`` stay as they are."""
    module.forward = partial(_forward, module, Packed(copy))  # type: ignore[method-assign]


class Matrix:
    """A weight (n, d) that belongs to no module, and how it multiplies: ``matrix(x)`` (..., n)."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.packed = weight, Packed()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (..., d) times the weight transposed."""
        return linear(x, self.weight, None, self.packed)


def packed_of(module: Any) -> Packed | None:
    """What `pack` gave to a layer."""
    forward = getattr(module, "__dict__", {}).get("forward")
    if isinstance(forward, partial) and forward.func is _forward:
        packed: Packed = forward.args[1]
        return packed
    return None


def check_packed(network: nn.Module) -> None:
    """Forget copies of weights that hold other numbers by now, as far as a sample tells: those
    that were changed where PyTorch does not notice."""
    for module in network.modules():
        forward = module.__dict__.get("forward")  # a call of `packed_of` for each adds up
        for packed in forward.args if type(forward) is partial else ():
            if isinstance(packed, Packed):
                packed.check(getattr(module, packed.name))


def _forward(module: nn.Linear, packed: Packed, input: torch.Tensor) -> torch.Tensor:
    """As `linear`.  A weight that is what it was at the last product, and a few rows, which is what
    a step has, are multiplied here: calls of Python take as long as a small product."""
    weight, bias, made = module.weight, module.bias, packed.made
    if made is None or made.alone is None:
        return linear(input, weight, bias, packed)
    rows = input.shape[:-1].numel()
    version = 0 if weight.is_inference() else weight._version
    if (
        not 0 < rows <= SIZES[-1]
        or made.known != (weight.data_ptr(), version, input.dtype)
        or torch.is_grad_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.compiler.is_compiling()
    ):
        return linear(input, weight, bias, packed)
    x, size = input.reshape(rows, -1), FILLED[rows]
    if size > rows:
        x = nn.functional.pad(x, (0, 0, 0, size - rows))
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(
        x, made.alone, bias, "none", [], ""
    )
    return result[:rows].view(*input.shape[:-1], len(weight))


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, packed: Packed | None
) -> torch.Tensor:
    """``x`` (..., d) times ``weight`` (n, d) transposed, plus ``bias`` (n,): (..., n), by
    ``packed`` where it can, else by `torch.nn.functional.linear`."""
    parts = None if packed is None else packed.parts(weight)
    if parts is None or x.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(x, weight, bias)
    if len(parts) == 1:
        return product(x, parts[0], bias)
    biases = [None] * len(parts) if bias is None else torch.split(bias, ROWS)
    return torch.cat([product(x, *both) for both in zip(parts, biases, strict=True)], -1)


def product(x: torch.Tensor, part: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """``x`` (..., d) with one of `Packed.parts`, or of a `QuantisedLinear`.

    oneDNN prepares itself for every number of rows that it meets, and keeps that: half a megabyte
    and more for each, a gigabyte for a server whose steps all differ.  So only the numbers in
    `SIZES` are used: rows of zeros fill up to the next, and more rows go in pieces of the largest.
    A lone row, which would be summed in another order, gets company that way.
    """
    flat = x.reshape(-1, x.shape[-1])
    if isinstance(part, Weight):
        return part.multiply(flat, bias).view(*x.shape[:-1], part.shape[0])
    if hasattr(part, "rounded") and x.is_floating_point():
        own: torch.Tensor = part.multiply_rounded(part.rounded(flat), x.dtype)
        return (own if bias is None else own + bias).view(*x.shape[:-1], part.shape[0])
    if not getattr(part, "rows_matter", True):
        return _multiply(flat, part, bias).view(*x.shape[:-1], part.shape[0])
    if len(flat) <= SIZES[-1]:
        return _filled(flat, part, bias).view(*x.shape[:-1], part.shape[0])
    pieces = [_filled(piece, part, bias) for piece in torch.split(flat, SIZES[-1])]
    return torch.cat(pieces).view(*x.shape[:-1], part.shape[0])


def _filled(x: torch.Tensor, part: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """At most `SIZES[-1]` rows."""
    rows = len(x)
    size = FILLED[rows]
    if size > rows:
        x = nn.functional.pad(x, (0, 0, 0, size - rows))
    return _multiply(x, part, bias)[:rows]


def _multiply(x: torch.Tensor, part: Any, bias: torch.Tensor | None) -> torch.Tensor:
    if not isinstance(part, torch.Tensor):
        own: torch.Tensor = part.multiply(x)
        return own if bias is None else own + bias
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, part, bias, "none", [], "")
    return result
