"""Decoder layers by compiled kernels in two calls, before and after their attention.

A layer's parts are a dozen calls of Python, which take as long as the products of small networks.
The bits are those of the parts; where a part is not what `adopt` left (an adapter, a hook, somebody
else's forward, a quantised weight), the layer runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels.cpu import layers, library
from ..kernels.cpu.products import Weight
from ..kernels.linear import packed_of
from . import mlp, norms, rotary
from .attention import FUNCTIONS
from .forwards import classes, replace_forwards

MADE: WeakKeyDictionary[nn.Module, layers.Layer] = WeakKeyDictionary()


def join_parts(hf: PreTrainedModel) -> None:
    """Let the decoder layers of ``hf`` call the kernels themselves.  Changes them in place."""
    replace_forwards(hf, classes("DecoderLayer", ("llama", "qwen2")), _forward)


def _forward(
    module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None, past_key_values: Any = None, use_cache: bool = False,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """The forward of a decoder layer: ``hidden_states`` (1, Q, D) to the same shape."""
    attention, rest = module.self_attn, rest | {"position_ids": position_ids}
    place = getattr(past_key_values, "place", None)
    written = place(attention.layer_idx) if place and library() else None
    made = None
    if written is not None and position_embeddings is not None:
        made = _made(module, hidden_states, *position_embeddings, *written)
    if made is None or written is None or position_embeddings is None:
        result: torch.Tensor = type(module).forward(
            module, hidden_states, attention_mask, past_key_values=past_key_values,
            use_cache=use_cache, position_embeddings=position_embeddings, **rest,
        )  # fmt: skip
        return result
    keys, values, slots = written
    cos, sin = (each[0].contiguous() for each in position_embeddings)
    q = made.begin(hidden_states[0], cos, sin, slots, keys[0], values[0])
    attended, _ = FUNCTIONS[attention.config._attn_implementation](
        attention, q[None], keys, values, attention_mask, scaling=attention.scaling, **rest
    )
    return made.end(hidden_states[0], attended[0].contiguous())[None]


def _made(
    module: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor,
    values: torch.Tensor, slots: torch.Tensor,
) -> layers.Layer | None:  # fmt: skip
    """The layer as the kernels want it; None where it has to run as it is."""
    attention, gated = module.self_attn, module.mlp
    both = module.input_layernorm, module.post_attention_layernorm
    scales = [each.weight for each in both]
    if (
        len(x) != 1 or not x.is_contiguous()
        or not (layers.suits(x, *scales, keys, values) and layers.suits(cos, sin))
        or slots.dtype != torch.int64 or not slots.is_contiguous()
        or keys.stride(3) != 1 or values.stride(3) != 1
        or not (_plain(attention, rotary._forward) and _plain(gated, mlp._forward))
        or not all(_plain(each, norms._forward) for each in both)
        or type(gated.act_fn).__name__ not in mlp.SILU
    ):  # fmt: skip
        return None
    linears = (
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
        gated.gate_proj, gated.up_proj, gated.down_proj,
    )  # fmt: skip
    weights = list[Any]()
    for linear in linears:
        packed = packed_of(linear)
        parts = None if packed is None or _hooked(linear) else packed.parts(linear.weight)
        if parts is None or len(parts) != 1 or type(parts[0]) is not Weight:
            return None
        weights.append(parts[0])
    given = weights, [linear.bias for linear in linears], scales
    made = MADE.get(module)
    if made is None or not made.holds(*given):
        eps = [each.variance_epsilon for each in both]
        made = MADE[module] = layers.Layer(*given, eps)
    return made


def _plain(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether the part computes ``forward`` and nothing else."""
    own = module.__dict__.get("forward")
    return type(own) is partial and own.func is forward and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
