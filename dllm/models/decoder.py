"""Decoder layers by compiled kernels, in one call.

A layer's parts are a dozen calls of Python, which take as long as the products of small networks.
The bits are those of the parts; where a part is not what `adopt` left (an adapter, a hook, somebody
else's forward), the layer runs as it is.
"""

from __future__ import annotations

from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from ..kernels.cpu import layers, library
from ..kernels.cpu.products import Weight, Weight4, Weight8
from ..kernels.linear import Packed, packed_of
from ..kernels.quantised import QuantisedLinear
from . import mlp, norms, rotary
from .attention import PREFIX
from .forwards import CACHE, classes, replace_forwards

EXACT = {  # attention that a layer's one call computes, `grouped` or not, as `grouped_rows` does
    (PREFIX + "sdpa", False): False, (PREFIX + "sdpa", True): False, (PREFIX + "eager", True): True,
}  # fmt: skip
MADE: WeakKeyDictionary[nn.Module, Joined] = WeakKeyDictionary()


def join_parts(hf: PreTrainedModel) -> None:
    """Let the decoder layers of ``hf`` call the kernels themselves.  Changes them in place."""
    if library() is not None:
        replace_forwards(hf, classes("DecoderLayer", ("llama", "qwen2")), _forward)


def computes_all(hf: PreTrainedModel) -> bool:
    """Whether the kernels compute all layers and the head of ``hf``, a row alone as one of many."""
    own = [
        module for module in hf.modules()
        if getattr(module.__dict__.get("forward"), "func", None) is _forward
    ]  # fmt: skip
    with torch.no_grad():
        whole = [module for module in own if _joined(module).layer is not None]
    head: Any = hf.get_output_embeddings()  # type: ignore[no-untyped-call]
    hooked = head is None or head._forward_hooks or head._forward_pre_hooks
    count = hf.config.get_text_config().num_hidden_layers
    return len(whole) == count and not hooked and _packed(head) is not None


def _joined(module: Any) -> Joined:
    """The layer as it is now."""
    made = MADE.get(module)
    if made is None or not made.holds():
        made = MADE[module] = Joined(module)
    return made


def _forward(
    module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """The forward of a decoder layer: ``hidden_states`` (1, Q, D) to the same shape.  The last one
    may leave rows as they are that are not ``scored``: nobody reads them."""
    attention, scored = module.self_attn, rest.pop("scored", None)
    rest["position_ids"] = position_ids
    place, segments = getattr(rest.get(CACHE), "place", None), rest.get("segments")
    kind = attention.config._attn_implementation, bool(rest.get("grouped"))
    if (
        place and kind in EXACT and type(segments) is list and rest.get("watch") is None
        and position_embeddings is not None and hidden_states.device.type == "cpu"
        and len(hidden_states) == 1 and hidden_states.is_contiguous()
        and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    ):  # fmt: skip
        made = _joined(module)
        layer, x, (cos, sin) = made.layer, hidden_states[0], position_embeddings
        if layer is not None and x.dtype == made.states.dtype:
            keys, values, slots = place(attention.layer_idx, made.states)
            heads = layer.queries // layer.shared
            parts = [each.part(heads, x.dtype) for each in segments]
            if (
                x.dtype == keys.dtype == values.dtype and cos.dtype in layers.DTYPES
                and cos.dtype == sin.dtype and slots.dtype == torch.int64 and slots.is_contiguous()
                and keys.stride(3) == values.stride(3) == 1 and None not in parts
                and keys.shape[3] % 2 == keys.stride(2) % 2 == 0  # bfloat16 is read in pairs
            ):  # fmt: skip
                cos, sin = cos[0].contiguous(), sin[0].contiguous()
                if not made.last or module._forward_hooks:
                    scored = None
                done = layer(
                    x, cos, sin, slots, keys[0], values[0], parts, attention.scaling, EXACT[kind],
                    scored,
                )  # fmt: skip
                if done is not None:
                    return done[None]
    result: torch.Tensor = type(module).forward(
        module, hidden_states, attention_mask, position_embeddings=position_embeddings, **rest
    )
    return result


class Joined:
    """A layer as the kernels want it, None where it has to run as it is, and what that was made of.
    To look whether it still is takes no calls: they are what is saved here."""

    def __init__(self, module: Any) -> None:
        attention, gated = module.self_attn, module.mlp
        both = module.input_layernorm, module.post_attention_layernorm
        linears = (
            attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
            gated.gate_proj, gated.up_proj, gated.down_proj,
        )  # fmt: skip
        parts = attention, gated, *both, *linears
        packed = [_packed(each) for each in linears]
        weights = _weights(parts, packed)
        scales = [each.weight for each in both]
        size, count = attention.head_dim, attention.config.num_hidden_layers
        self.last = attention.layer_idx == count - 1
        self.states = scales[0].new_empty(1, attention.k_proj.out_features // size, 0, size)
        self.layer = None
        if weights is not None:
            biases, eps = [each.bias for each in linears], [each.variance_epsilon for each in both]
            if layers.suits(*scales, *(x for x in biases if x is not None)):
                self.layer = layers.Layer(weights, biases, scales, eps)
        self.packed = [each for each in packed if each is not None]
        self.made = [each.made for each in self.packed]
        self.children = [each._modules for each in (module, attention, gated)]
        self.parts = [list(each.values()) for each in self.children]
        self.hooks = [x for each in parts for x in (each._forward_hooks, each._forward_pre_hooks)]
        self.hooked = any(self.hooks)
        self.attributes = [each.__dict__ for each in parts]
        self.forwards = [each.get("forward") for each in self.attributes]
        self.owners = [each._parameters for each in (*linears, *both)]
        self.tensors = self._tensors()

    def holds(self) -> bool:
        """Whether these are still its parts, with the same weights."""
        return (
            any(self.hooks) == self.hooked
            and [*map(list, map(dict.values, self.children))] == self.parts
            and [*map(dict.get, self.attributes, repeat("forward"))] == self.forwards
            and all(map(is_, map(attrgetter("made"), self.packed), self.made))
            and self._tensors() == self.tensors
        )

    def _tensors(self) -> list[tuple[int, int]]:
        """Where each tensor lies, and how often it was changed in place."""
        return [
            (x.data_ptr(), 0 if x.is_inference() else x._version)
            for owner in self.owners for x in owner.values() if x is not None
        ]  # fmt: skip


def _packed(linear: Any) -> Packed | QuantisedLinear | None:
    """What keeps a weight as the kernels multiply by it."""
    return linear if type(linear) is QuantisedLinear and linear.bare else packed_of(linear)


def _weights(parts: tuple[Any, ...], packed: list[Any]) -> list[Any] | None:
    """The packed weights, all of one kind; None where a part is not what `adopt` left."""
    own = rotary._forward, mlp._forward, norms._forward, norms._forward
    for part, forward in zip(parts, own, strict=False):
        given = part.__dict__.get("forward")
        if type(given) is not partial or given.func is not forward:
            return None
    if (
        None in packed
        or type(parts[1].act_fn).__name__ not in mlp.SILU
        or any(each._forward_hooks or each._forward_pre_hooks for each in parts)
    ):
        return None
    found = [
        each.parts(linear.weight) if isinstance(each, Packed) else each.parts()
        for linear, each in zip(parts[4:], packed, strict=True)
    ]
    weights = [part for each in found for part in each or (None,)]
    one_kind = {*map(type, weights)} in ({Weight}, {Weight8}, {Weight4})
    return weights if one_kind and len(weights) == len(packed) else None
