"""Attention, norms, gates and rotation by compiled kernels, where there are some."""

import ctypes
from collections.abc import Collection, Sequence

import torch

from .compiled import library, loaded
from .products import Weight, Weight4, Weight8

DTYPES = (torch.float32, torch.bfloat16)
_Strides, _A = ctypes.c_int64 * 11, ctypes.c_void_p


def suits(*tensors: torch.Tensor) -> bool:
    """Whether compiled kernels can take these: on a CPU, of one known dtype, no gradients."""
    dtype = tensors[0].dtype
    for x in tensors:  # calls of Python would take as long as what is asked for
        if x.dtype != dtype or x.device.type != "cpu":
            return False
    return (
        library() is not None
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and dtype in DTYPES
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` (..., d) normed in float32, rounded, times ``weight`` (d,), rounded."""
    x, weight, size = x.contiguous(), weight.contiguous(), x.shape[-1]
    result = torch.empty_like(x)
    loaded().dllm_rms_norm(
        x.data_ptr(), weight.data_ptr(), result.data_ptr(), x.numel() // size, size, eps,
        x.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return result


def silu_times(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """SiLU of ``x``, rounded, times ``other`` of the same shape, rounded."""
    x, other = x.contiguous(), other.contiguous()
    result = torch.empty_like(x)
    loaded().dllm_silu_times(
        x.data_ptr(), other.data_ptr(), result.data_ptr(), x.numel(), x.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )  # fmt: skip
    return result


def rotates(*tensors: torch.Tensor) -> bool:
    """Whether `rotate_scatter` can take its arguments."""
    q, k, v, cos, sin, slots, keys, values = tensors
    return (
        suits(q, k, v) and suits(cos, sin) and suits(keys, values)
        and slots.dtype == torch.int64
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and keys.stride(-1) == values.stride(-1) == 1
    )  # fmt: skip


def rotate_scatter(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
    slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """As `dllm.kernels.rotation.rotate_scatter`, with its bits."""
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.contiguous()
    turned = keys.new_empty(q.shape)
    strides = [stride for x in (q, k, v, keys, values) for stride in x.stride()[:2]]
    kinds = (q, cos, keys)
    refused = loaded().dllm_rotate_scatter(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(),
        turned.data_ptr(), keys.data_ptr(), values.data_ptr(), _Strides(*strides), len(q), len(k),
        *q.shape[1:], keys.shape[1],
        sum((x.dtype == torch.bfloat16) << i for i, x in enumerate(kinds)), torch.get_num_threads(),
    )  # fmt: skip
    if refused:
        raise IndexError(f"slots go from 0 to {keys.shape[1] - 1} here")
    return turned


def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether `attention` can take its arguments."""
    return (
        suits(q, k, v, v if mask is None else mask)
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and (mask is None or mask.stride(-1) == 1)
        and q.shape[-1] % 2 == 0
        and k.stride(2) % 2 == 0  # in bfloat16 pairs are read as one
        and v.shape[-1] == q.shape[-1]
        and k.shape[2] > 0
    )


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float,
    exact: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention (R, H, m, dh) of ``q`` (R, H, m, dh) over ``k``, ``v`` (R, H, L, dh), with ``mask``
    (R, m, L) added to the scores.  Rows that see nothing come out as zero.

    ``exact``: what is summed over keys is summed in float64, so that neither the order of the keys
    nor hidden ones among them change a query's bits.
    """
    result = q.new_empty(q.shape)
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    strides += (0, 0) if mask is None else mask.stride()[:2]
    rows, heads, count, size = q.shape
    loaded().dllm_attention(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), None if mask is None else mask.data_ptr(),
        result.data_ptr(), _Strides(*strides), rows, heads, count, k.shape[2], size, scale, exact,
        q.dtype == torch.bfloat16, torch.get_num_threads(),
    )  # fmt: skip
    return result


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "scale", "second")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "plain", "group")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("norm", "second_norm", "q_norm", "k_norm")),
        *((name, ctypes.c_double) for name in ("eps", "second_eps", "q_eps", "k_eps")),
    )


def _linear(weight: Weight | Weight8 | Weight4, bias: torch.Tensor | None = None) -> _Linear:
    scales: tuple[int | None, int | None] = None, None
    if not isinstance(weight, Weight):
        second = weight.total if isinstance(weight, Weight8) else weight.zero
        scales = weight.scale.data_ptr(), second.data_ptr()
    return _Linear(
        weight.blocks.data_ptr(), None if bias is None else bias.data_ptr(), *scales,
        *weight.shape, isinstance(weight, Weight) and not weight.copy,
        weight.group if isinstance(weight, Weight4) else 0,
    )  # fmt: skip


class Groups:
    """Weights of one class and shape (n, d), a group of rows for each."""

    def __init__(self, weights: Sequence[Weight | Weight8 | Weight4]) -> None:
        self.weights = list(weights)
        self.linears = (_Linear * len(weights))(*map(_linear, weights))

    def __call__(self, x: torch.Tensor, of: torch.Tensor, each: int) -> torch.Tensor:
        """(m, n): row i is row ``i // each`` of ``x`` (m / each, d), float32 or bfloat16, times
        the weight ``of[i]``, int64."""
        x, of = x.contiguous(), of.contiguous()
        result = x.new_empty(len(of), self.weights[0].shape[0])
        if loaded().dllm_grouped(
            self.linears, len(self.weights), of.data_ptr(), each, x.data_ptr(), result.data_ptr(),
            len(of), x.dtype == torch.bfloat16, torch.get_num_threads(),
        ):  # fmt: skip
            raise IndexError(f"groups go from 0 to {len(self.weights) - 1} here")
        return result


class Part(ctypes.Structure):
    """Queries of a layer's call that attend the same keys: from ``first`` on ``count`` of each of
    ``rows`` rows, over ``length`` slots from ``begin`` on, or over those at the address ``chosen``,
    counted from ``begin``; each row reads ``stride`` slots behind the last.  ``mask``: the address
    of what is added to the scores, (rows, queries of heads that share keys, length)."""

    _fields_ = (
        *((each, ctypes.c_int64) for each in ("first", "count", "rows")),
        *((each, ctypes.c_int64) for each in ("begin", "length", "stride")),
        *((each, ctypes.c_void_p) for each in ("chosen", "mask")),
    )


class Layers:
    """Decoder layers, one behind the other, in one call, with the bits of their parts.

    Of each the ``weights`` (q, k, v, o, gate, up, down), all of one class, ``biases`` of the same,
    and ``norms``: both weights (d,), of Qwen3 also those of queries and keys (dh,), and ``eps`` of
    each; all of one dtype, float32 or bfloat16.
    """

    def __init__(
        self, weights: Sequence[Sequence[Weight | Weight8 | Weight4]],
        biases: Sequence[Sequence[torch.Tensor | None]],
        norms: Sequence[Sequence[torch.Tensor]], eps: Sequence[Sequence[float]],
    ) -> None:  # fmt: skip
        self.weights, self.library, self.count = list(weights), loaded(), len(weights)
        self.layers = (_Layer * self.count)(*(
            _Layer(*map(_linear, own, bias), *(norm.data_ptr() for norm in some),
                   *[None] * (4 - len(some)), *each)
            for own, bias, some, each in zip(weights, biases, norms, eps, strict=True)
        ))  # fmt: skip
        self.sharing = weights[0][0].shape[0] // weights[0][1].shape[0]  # heads that share keys

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
        keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], parts: Sequence[Part],
        scale: float, exact: bool, kept: torch.Tensor | None = None,
        recorded: Collection[int] = (),
    ) -> list[torch.Tensor] | None:  # fmt: skip
        """What each layer makes of the rows ``x`` (1, m, d); only the last and ``recorded`` ones
        keep it.  Keys and values, rotated by ``cos`` and ``sin`` (1, m, dh), go to ``slots`` of
        each layer's ``keys`` and ``values`` (1, Hkv, S, dh), which the ``parts`` attend, as
        `attention` does.  None where one reads what is not there.

        ``kept`` (n,) int64: rows that alone the last layer works out; others stay as they are."""
        result, half, many, rows = torch.empty_like(x), torch.bfloat16, len(parts), x.shape[1]
        results = [torch.empty_like(x) if i in recorded else result for i in range(self.count - 1)]
        results.append(result)
        step = self.count if rows <= 64 else 1  # many take seconds per layer, and Ctrl-C waits
        for at in range(0, self.count, step):
            n = rows if kept is None or at + step < self.count else min(rows, len(kept))
            refused = self.library.dllm_layers(
                ctypes.byref(self.layers, at * ctypes.sizeof(_Layer)), step,
                (results[at - 1] if at else x).data_ptr(), cos.data_ptr(), sin.data_ptr(),
                slots.data_ptr(), *(
                    (_A * step)(*[each.data_ptr() for each in some[at : at + step]])
                    for some in (keys, values)
                ),
                _Strides(*keys[0].stride()[1:3], *values[0].stride()[1:3]), (Part * many)(*parts),
                many, None if kept is None else kept.data_ptr(), n,
                (_A * step)(*[each.data_ptr() for each in results[at : at + step]]), rows,
                keys[0].shape[3], keys[0].shape[2], scale, exact,
                (x.dtype == half) | (cos.dtype == half) << 1 | (keys[0].dtype == half) << 2,
                torch.get_num_threads(),
            )  # fmt: skip
            if refused == 1:
                raise IndexError(f"slots go from 0 to {keys[0].shape[2] - 1} here")
            if refused:
                return None
        return results
