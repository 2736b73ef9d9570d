"""Decoder layers by compiled kernels: all of a network in one call, or one.

A layer's parts are a dozen calls of Python, which take as long as the products of small networks.
The bits are those of the parts; where a part is not what `adopt` left (an adapter, a hook, somebody
else's forward), the layer runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

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
OUTPUTS = ("output_hidden_states", "output_attentions")  # of all layers, by transformers
MADE: WeakKeyDictionary[nn.Module, Joined] = WeakKeyDictionary()


def join_parts(hf: PreTrainedModel) -> None:
    """Let the decoder layers of ``hf`` call the kernels themselves.  Changes them in place."""
    if library() is not None:
        replace_forwards(hf, classes("DecoderLayer", ("llama", "qwen2")), _layer)
        replace_forwards(hf, classes("Model", ("llama", "qwen2")), _network)


def computes_all(hf: PreTrainedModel) -> bool:
    """Whether the kernels compute all layers and the head of ``hf``, a row alone as one of many."""
    networks = [module for module in hf.modules() if _runs(module, _network)]
    head: Any = hf.get_output_embeddings()  # type: ignore[no-untyped-call]
    hooked = head is None or head._forward_hooks or head._forward_pre_hooks
    if hooked or _packed(head) is None or len(networks) != 1:
        return False
    found = _layers(networks[0])
    with torch.no_grad():
        return bool(found) and _joined(networks[0], found).layers is not None


def _runs(module: Any, forward: Callable[..., Any]) -> bool:
    """Whether ``forward`` is still that of the module."""
    return getattr(module.__dict__.get("forward"), "func", None) is forward


def _layers(network: Any) -> list[Any]:
    """The layers of a network; none where somebody looks at one, or has changed its forward."""
    found = list(network.layers)
    own = [
        each for each in found
        if _runs(each, _layer) and not each._forward_hooks and not each._forward_pre_hooks
    ]  # fmt: skip
    return found if len(own) == network.config.num_hidden_layers == len(found) else []


def _joined(owner: Any, modules: Sequence[Any]) -> Joined:
    """The layers of ``owner`` as they are now."""
    made = MADE.get(owner)
    if made is None or not made.holds(modules):
        made = MADE[owner] = Joined(modules)
    return made


def _network(
    module: Any, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None, *args: Any, **rest: Any,
) -> BaseModelOutputWithPast:  # fmt: skip
    """The forward of a network: all layers at once, or one by one."""
    kind = None if args or position_ids is None else _kind(module, rest)
    asked = any(rest.get(name, getattr(module.config, name, False)) for name in OUTPUTS)
    found = [] if kind is None or asked else _layers(module)
    if kind and found:
        if rest.get("inputs_embeds") is None:
            rest["inputs_embeds"], input_ids = module.embed_tokens(input_ids), None
        x = rest["inputs_embeds"]
        angles = module.rotary_emb(x, position_ids=position_ids)
        done = _computed(module, found, x, angles, kind, rest)
        if done is not None:
            return BaseModelOutputWithPast(module.norm(done))
    result: BaseModelOutputWithPast = type(module).forward(
        module, input_ids, attention_mask, position_ids, *args, **rest
    )
    return result


def _layer(
    module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """The forward of a decoder layer: ``hidden_states`` (1, Q, D) to the same shape."""
    kind, scored, angles = (
        _kind(module.self_attn, rest),
        rest.pop("scored", None),
        position_embeddings,
    )
    if kind and angles is not None:
        seen = rest if module._forward_hooks else rest | {"scored": scored}
        done = _computed(module, [module], hidden_states, angles, kind, seen)
        if done is not None:
            return done
    result: torch.Tensor = type(module).forward(
        module, hidden_states, attention_mask, position_ids, position_embeddings=angles, **rest
    )
    return result


def _kind(module: Any, rest: dict[str, Any]) -> tuple[str, bool] | None:
    """Which attention ``module`` is asked for, of those in `EXACT`; None where it is another, or
    the kernels cannot be called."""
    kind = module.config._attn_implementation, bool(rest.get("grouped"))
    able = (
        kind in EXACT and hasattr(rest.get(CACHE), "place") and type(rest.get("segments")) is list
        and rest.get("watch") is None and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
    )  # fmt: skip
    return kind if able else None


def _computed(
    owner: Any, modules: Sequence[Any], x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor],
    kind: tuple[str, bool], rest: dict[str, Any],
) -> torch.Tensor | None:  # fmt: skip
    """``x`` (1, Q, D) after the layers ``modules`` of ``owner``, by the kernels; None where these
    cannot.  The last one of all may leave rows as they are that are not ``scored``: nobody reads
    them."""
    if x.device.type != "cpu" or len(x) != 1 or not x.is_contiguous():
        return None
    made, (cos, sin) = _joined(owner, modules), angles
    if made.layers is None or x.dtype != made.states.dtype:
        return None
    places = [rest[CACHE].place(i, made.states) for i in made.indices]
    keys, values, slots = [one[0] for one in places], [one[1] for one in places], places[0][2]
    parts = [each.part(made.layers.sharing, x.dtype) for each in rest["segments"]]
    first = keys[0]
    if (
        {(k.dtype, v.dtype) for k, v, _ in places} != {(x.dtype, x.dtype)}
        or cos.dtype not in layers.DTYPES or cos.dtype != sin.dtype or None in parts
        or slots.dtype != torch.int64 or not slots.is_contiguous()
        or {k.stride() for k in keys} != {first.stride()} or first.stride(3) != 1
        or {v.stride() for v in values} != {values[0].stride()} or values[0].stride(3) != 1
        or first.shape[3] % 2 or first.stride(2) % 2  # bfloat16 is read in pairs
    ):  # fmt: skip
        return None
    return made.layers(
        x, cos.contiguous(), sin.contiguous(), slots, keys, values, parts, made.scale, EXACT[kind],
        rest.get("scored") if made.last else None,
    )  # fmt: skip


class Joined:
    """Layers as the kernels want them, None where one has to run as it is, and what they were made
    of.  To look whether they still are takes no calls: they are what is saved here."""

    def __init__(self, modules: Sequence[Any]) -> None:
        each = [
            (one.self_attn, one.mlp, one.input_layernorm, one.post_attention_layernorm,
             *attrgetter("q_proj", "k_proj", "v_proj", "o_proj")(one.self_attn),
             *attrgetter("gate_proj", "up_proj", "down_proj")(one.mlp))
            for one in modules
        ]  # fmt: skip
        packed = [[_packed(linear) for linear in parts[4:]] for parts in each]
        weights = [own for own in map(_weights, each, packed) if own is not None]
        attentions = [parts[0] for parts in each]
        self.indices = [attention.layer_idx for attention in attentions]
        self.last = self.indices[-1] == attentions[-1].config.num_hidden_layers - 1
        alike = {(attention.head_dim, attention.scaling) for attention in attentions}
        shapes = {own[1].shape for own in weights}
        self.layers = None
        if len(weights) == len(each) and len(alike) == len(shapes) == 1:
            biases = [[linear.bias for linear in parts[4:]] for parts in each]
            norms = [[norm.weight for norm in parts[2:4]] for parts in each]
            eps = [[norm.variance_epsilon for norm in parts[2:4]] for parts in each]
            (size, self.scale), first = alike.pop(), norms[0][0]
            self.states = first.new_empty(1, weights[0][1].shape[0] // size, 0, size)
            if layers.suits(*(x for own in (*norms, *biases) for x in own if x is not None)):
                self.layers = layers.Layers(weights, biases, norms, eps)
        whole = [part for parts in each for part in parts]
        self.packed = [one for own in packed for one in own if one is not None]
        self.made = [one.made for one in self.packed]
        own = [*modules, *(one for parts in each for one in parts[:2])]
        self.children = [one._modules for one in own]
        self.parts = [list(one.values()) for one in self.children]
        self.hooks = [x for one in whole for x in (one._forward_hooks, one._forward_pre_hooks)]
        self.hooked = any(self.hooks)
        self.attributes = [one.__dict__ for one in whole]
        self.forwards = [one.get("forward") for one in self.attributes]
        self.owners = [one._parameters for parts in each for one in parts[2:]]
        self.tensors = self._tensors()

    def holds(self, modules: Sequence[Any]) -> bool:
        """Whether these are still the parts of ``modules``, with the same weights."""
        return (
            len(modules) == len(self.indices)
            and all(map(is_, map(attrgetter("_modules"), modules), self.children))
            and any(self.hooks) == self.hooked
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
