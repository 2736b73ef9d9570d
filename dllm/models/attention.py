"""Attention over packed rows, as transformers attention implementations ``dllm_<base>``.

A step of a batch feeds rows of different lengths that read different keys.  Packed, they are one
sequence without padding: the projections see ``(1, Q, D)``, and the attention function runs each
row, a `Segment`, against its own keys.  Without segments ``dllm_<base>`` is ``<base>``, except
that queries and keys are cast to the values' dtype first: some families rotate in float32.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.models.llama import modeling_llama

from ..core.errors import ConfigError, UnknownNameError, missing
from .grouped import grouped_rows
from .segments import Segment
from .varlen import Borders, Varlen

PREFIX = "dllm_"
PACKAGES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
VARLEN = {"sdpa": Varlen(), **{name: Varlen(package) for name, package in PACKAGES.items()}}
BASES = ("eager", "sdpa", *PACKAGES, "flex_attention")

FUNCTIONS: Mapping[str, Any] = AttentionInterface()  # type: ignore[no-untyped-call]
MASKS: Mapping[str, Any] = AttentionMaskInterface()  # type: ignore[no-untyped-call]
Attended = tuple[Tensor, Tensor | None]


def attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, base: str,
    scaling: float | None = None, dropout: float = 0.0,
    segments: Sequence[Segment] | Borders | None = None,
    watch: Callable[[nn.Module, Tensor, Tensor], None] | None = None, grouped: bool = False,
    **options: Any,
) -> Attended:  # fmt: skip
    """Attention with the ``base`` implementation, packed when there are ``segments``.

    ``q`` (B, H, Q, dh) and ``k``, ``v`` (B, Hkv, S, dh); B is 1 for packed calls, which ignore
    ``mask``; ``watch`` sees the module, the queries and the keys first.  ``grouped``: heads that
    share keys attend them together, see `grouped_rows`; SDPA, which does so on a CPU in any case,
    or eager, which is then exact.
    Returns ``(B, Q, H, dh)`` in the dtype of ``v``, and the weights where the base returns them.
    Packed queries that no segment covers come out as zero.
    """
    q, k = q.to(v.dtype), k.to(v.dtype)
    scale: Any = getattr(module, "scaling", None) if scaling is None else scaling
    if segments is not None and watch is not None:
        watch(module, q, k)
    if isinstance(segments, Borders):
        attended = VARLEN[base](q, k, v, segments, scale)
        assert attended is not None, "borders say all that a kernel needs"
        return attended, None
    if segments is not None and (grouped or (base == "sdpa" and v.device.type == "cpu")):
        return grouped_rows(q, k, v, segments, scale, exact=base == "eager"), None
    call = partial(_base(base, module), scaling=scale, dropout=dropout)
    if segments is None:
        causal = options.pop("is_causal", None)
        causal = bool(getattr(module, "is_causal", True)) if causal is None else causal
        if getattr(module, "block_length", None):
            mask = _block_causal(module.block_length, options.get("position_ids"), q, mask)
        if not causal:  # flash kernels would take gaps between positions for borders of rows
            options.pop("position_ids", None)
        return call(module, q, k, v, mask, is_causal=causal, **options)
    for name in ("is_causal", "position_ids", "sliding_window", "scored"):  # not the base's
        options.pop(name, None)
    if base in VARLEN and VARLEN[base].suits(v, q.shape[-1]):  # else transformers casts
        result = VARLEN[base](q, k, v, segments, scale)
        if result is not None:
            return result, None
    call = partial(call, is_causal=False, **options)
    return _packed(call, module, q, k, v, segments), None


def _block_causal(length: Any, positions: Tensor | None, q: Tensor, mask: Any) -> Tensor:
    """(B, 1, Q, Q) added to the scores: every block sees itself and what is left of it."""
    if positions is None:
        positions = torch.arange(q.shape[2], device=q.device)[None]
    blocks = positions // length
    hidden = (blocks[:, None, :] > blocks[:, :, None])[:, None]
    result = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
    result.masked_fill_(hidden, torch.finfo(q.dtype).min)
    if mask is None:
        return result
    seen = mask if mask.dtype != torch.bool else torch.where(mask, 0.0, torch.finfo(q.dtype).min)
    return torch.minimum(result, seen.to(q.dtype))


def _packed(
    call: Callable[..., Attended], module: nn.Module, q: Tensor, k: Tensor, v: Tensor,
    segments: Sequence[Segment],
) -> Tensor:  # fmt: skip
    out = v.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])
    for segment in segments:
        queries = rearrange(q[0, :, segment.queries], "h (r n) d -> r h n d", r=segment.rows)
        mask = None if segment.mask is None else segment.mask[:, None].to(v)
        rows, _ = call(module, queries, segment.rows_of(k), segment.rows_of(v), mask)
        out[0, segment.queries] = rows.flatten(0, 1)
    return out


def _base(name: str, module: nn.Module) -> Callable[..., Attended]:
    if name == "eager":  # each transformers file has its own, e.g. with soft-capped logits
        file = sys.modules[type(module).__module__]
        return getattr(file, "eager_attention_forward", modeling_llama.eager_attention_forward)
    function: Callable[..., Attended] = FUNCTIONS[name]
    if name == "flex_attention":
        return _flex(function)
    return _flash(name, function) if name in PACKAGES else function


def _flex(function: Callable[..., Attended]) -> Callable[..., Attended]:
    """A mask that is a tensor goes to SDPA: compiled for a CPU, FlexAttention crashes on one."""

    def call(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **rest: Any) -> Attended:
        chosen = FUNCTIONS["sdpa"] if isinstance(mask, Tensor) else function
        return chosen(module, q, k, v, mask, **rest)

    return call


def _flash(name: str, function: Callable[..., Attended]) -> Callable[..., Attended]:
    """The flash function picks its kernel by the name in the module's config: show it ``name``."""

    def call(module: Any, *args: Any, **rest: Any) -> Attended:
        shown = SimpleNamespace(
            config=SimpleNamespace(_attn_implementation=name),
            layer_idx=getattr(module, "layer_idx", None),
            is_causal=module.is_causal,
            training=module.training,
        )
        return function(shown, *args, **rest)

    return call


def set_attention(hf: PreTrainedModel, base: str) -> None:
    """Make ``hf`` use ``dllm_<base>``.  Raises like `use_attention`."""
    base = base.removeprefix(PREFIX)
    use_attention(hf, base)
    hf.config._attn_implementation = PREFIX + base


def use_attention(hf: PreTrainedModel, base: str) -> None:
    """Make ``hf`` use ``base`` as transformers has it.

    Raises `UnknownNameError` for other names than `BASES` and `ConfigError` when the package of
    a flash implementation is missing or the network does not support ``base``.
    """
    if base not in BASES:
        raise UnknownNameError("attention implementation", base, BASES)
    package = PACKAGES.get(base)
    if package is not None and importlib.util.find_spec(package) is None:
        raise missing(
            f"the package {package!r}, which attn_implementation={base!r} needs,", "flash",
            ", or use attn_implementation='sdpa'",
        )  # fmt: skip
    try:
        hf.set_attn_implementation(base)  # checks that network and machine can do it
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{type(hf).__name__} cannot run {base!r} attention: {error}") from error


@contextmanager
def attending(hf: PreTrainedModel, name: str) -> Iterator[None]:
    """Inside, ``hf`` attends with the implementation of that name in transformers."""
    before = hf.config._attn_implementation
    hf.config._attn_implementation = name
    try:
        yield
    finally:
        hf.config._attn_implementation = before


for _name in BASES:
    AttentionInterface.register(PREFIX + _name, partial(attend, base=_name))
    AttentionMaskInterface.register(PREFIX + _name, MASKS[_name])
