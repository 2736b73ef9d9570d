"""Rotary positions and the write to the key/value buffer, in one go.

A layer rotates its new queries and keys and puts keys and values where their positions belong in
the buffer: with plain operations about a dozen launches, here one.
"""

from importlib.util import find_spec as _find_spec
from types import ModuleType

import torch as _torch

from ...core.errors import ConfigError, UnknownNameError
from ..cpu import layers as _compiled
from ..cpu import library as _library
from . import naive as _naive
from . import torch as _fast

__all__ = ["rotate_scatter"]

_BACKENDS: dict[str, ModuleType] = {"naive": _naive, "torch": _fast, "compiled": _compiled}


def rotate_scatter(
    q: _torch.Tensor, k: _torch.Tensor, v: _torch.Tensor, cos: _torch.Tensor, sin: _torch.Tensor,
    slots: _torch.Tensor, keys: _torch.Tensor, values: _torch.Tensor, *, backend: str = "auto",
) -> _torch.Tensor:  # fmt: skip
    """Rotate ``q`` (H, Q, dh) and ``k`` (Hkv, Q, dh), write k and ``v`` (Hkv, Q, dh) to ``slots``.

    ``cos``, ``sin`` (Q, dh) belong to the positions of the Q new tokens; the first half of a head
    turns against its second half (as in LLaDA, Dream, Llama and Qwen).  The arithmetic has the
    dtype that ``q`` and ``cos`` promote to: with cos in float32 (LLaDA) a bfloat16 head is turned
    in float32, else every product and sum is rounded, both as in transformers.  ``slots`` (Q,)
    int64, distinct unless nobody reads them; ``keys`` and ``values`` (Hkv, S, dh) are written in
    place.  Returns the rotated queries (H, Q, dh) in the dtype of ``keys``.

    ``backend``: "triton" (a GPU), "torch" (any device), "compiled" (a CPU, `dllm.kernels.cpu`),
    "naive" (the oracle), "auto".  Raises `ConfigError` for shapes that do not fit together.
    """
    heads, count, width = k.shape
    if (
        v.shape != k.shape or q.shape[1:] != k.shape[1:] or slots.shape != (count,)
        or cos.shape != (count, width) or sin.shape != cos.shape or width % 2
        or keys.shape != values.shape or (keys.shape[0], keys.shape[2]) != (heads, width)
    ):  # fmt: skip
        shapes = {n: tuple(x.shape) for n, x in locals().items() if isinstance(x, _torch.Tensor)}
        raise ConfigError(f"shapes do not fit together: {shapes}; see rotate_scatter")
    if backend == "auto":
        if q.device.type == "cuda" and _find_spec("triton"):
            backend = "triton"
        else:
            fits = _library() and _compiled.rotates(q, k, v, cos, sin, slots, keys, values)
            backend = "compiled" if fits else "torch"
    if backend == "triton":
        from . import triton as module
    elif backend in _BACKENDS:
        module = _BACKENDS[backend]
    else:
        raise UnknownNameError("backend", backend, ("auto", "triton", *_BACKENDS))
    return module.rotate_scatter(q, k, v, cos, sin, slots, keys, values)
