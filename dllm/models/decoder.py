"""Decoder layers by compiled kernels: all of a network in one call.

A layer's parts are a dozen calls of Python, which take as long as the products of small networks.
The bits are those of the parts; where a part is not what `adopt` left (an adapter, a hook, somebody
else's forward), its layer runs as it is.
"""

from functools import partial
from itertools import chain, groupby, repeat
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
from .forwards import CACHE, Recorder, classes, replace_forwards

EXACT = {  # attention that the one call computes, `grouped` or not, as `grouped_rows` does
    (PREFIX + "sdpa", False): False, (PREFIX + "sdpa", True): False, (PREFIX + "eager", True): True,
}  # fmt: skip
OUTPUTS = ("output_hidden_states", "output_attentions")  # of every layer, by transformers
LAYERS = classes("DecoderLayer")
PARTS = attrgetter(
    "self_attn", "mlp", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm",
    "post_attention_layernorm",
)  # fmt: skip
HEADS = ("q_norm", "k_norm")  # norms of each head, of Qwen3
MADE: WeakKeyDictionary[nn.Module, "Joined"] = WeakKeyDictionary()


def join_parts(hf: PreTrainedModel) -> None:
    """Let ``hf`` call the kernels for its decoder layers.  Changes it in place."""
    if library() is not None:
        replace_forwards(hf, classes("Model"), _forward)


def computes_all(hf: PreTrainedModel) -> bool:
    """Whether the kernels compute all layers and the head of ``hf``, a row alone as one of many."""
    found = ((one, one.__dict__.get("forward")) for one in hf.modules())
    own = [network for network, forward in found if getattr(forward, "func", None) is _forward]
    with torch.no_grad():
        runs = [run for module in own for run in _joined(module).runs]
    head: Any = hf.get_output_embeddings()  # type: ignore[no-untyped-call]
    hooked = head is None or head._forward_hooks or head._forward_pre_hooks
    return (
        len(runs) == 1 and runs[0].layers is not None and not hooked and _packed(head) is not None
    )


def _joined(network: Any) -> "Joined":
    """The layers of a network as they are now."""
    made = MADE.get(network)
    if made is None or not made.holds(network):
        made = MADE[network] = Joined(network)
    return made


def _forward(
    module: Any, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None, *args: Any, **rest: Any,
) -> BaseModelOutputWithPast:  # fmt: skip
    """The forward of a network.  Its last layer may leave rows as they are that are not ``scored``:
    nobody reads them."""
    kind = module.config._attn_implementation, bool(rest.get("grouped"))
    scored = rest.pop("scored", None)
    if (
        kind not in EXACT or type(rest.get("segments")) is not list or position_ids is None or args
        or not hasattr(rest.get(CACHE), "place") or rest.get("watch") is not None
        or any(rest.get(name, getattr(module.config, name, False)) for name in OUTPUTS)
        or module.norm.weight.device.type != "cpu" or torch.is_grad_enabled()
        or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
    ):  # fmt: skip
        result: BaseModelOutputWithPast = type(module).forward(
            module, input_ids, attention_mask, position_ids, *args, **rest
        )
        return result
    x = rest.pop("inputs_embeds", None)
    x = module.embed_tokens(input_ids) if x is None else x
    rest |= {"attention_mask": attention_mask, "position_ids": position_ids}
    rest["position_embeddings"] = module.rotary_emb(x, position_ids=position_ids)
    for run in _joined(module).runs:
        hooked = [i for i, layer in enumerate(run.modules) if layer._forward_hooks]
        outputs = run.computed(x, scored, hooked, EXACT[kind], rest)
        if outputs is None:
            for layer in run.modules:
                x = layer(x, **rest)
            continue
        for i in hooked:
            for hook in tuple(run.modules[i]._forward_hooks.values()):
                changed = hook(run.modules[i], (x,), outputs[i])
                outputs[i] = outputs[i] if changed is None else changed
        x = outputs[-1]
    return BaseModelOutputWithPast(module.norm(x))


class Run:
    """Layers ``modules``, or one that hooks may change; ``layers``: as the kernels want them."""

    def __init__(self, modules: list[Any], parts: list[Any], weights: list[Any]) -> None:
        self.modules, self.layers = modules, None
        if weights[0] is None:
            return
        biases = [[linear.bias for linear in own[2:9]] for own in parts]
        scales = [[norm.weight for norm in own[9:]] for own in parts]
        eps = [[norm.variance_epsilon for norm in own[9:]] for own in parts]
        if layers.suits(*(x for own in (*scales, *biases) for x in own if x is not None)):
            attention = parts[0][0]
            size, self.scale = attention.head_dim, attention.scaling
            self.indices = [own[0].layer_idx for own in parts]
            self.last = self.indices[-1] == attention.config.num_hidden_layers - 1
            self.states = scales[0][0].new_empty(1, weights[0][1].shape[0] // size, 0, size)
            self.layers = layers.Layers(weights, biases, scales, eps)

    def computed(
        self, x: torch.Tensor, scored: torch.Tensor | None, hooked: list[int], exact: bool,
        rest: dict[str, Any],
    ) -> list[torch.Tensor] | None:  # fmt: skip
        """What the kernels make of ``x`` (1, Q, D), see `Layers`; None where they cannot.  Of the
        layers ``hooked`` all rows are kept."""
        if (
            self.layers is None or x.dtype != self.states.dtype or x.device.type != "cpu"
            or len(x) != 1 or not x.is_contiguous()
        ):  # fmt: skip
            return None
        places = [rest[CACHE].place(i, self.states) for i in self.indices]
        keys, values, slots = [one[0] for one in places], [one[1] for one in places], places[0][2]
        parts = [each.part(self.layers.sharing, x.dtype) for each in rest["segments"]]
        (cos, sin), first = rest["position_embeddings"], keys[0]
        if (
            {(k.dtype, v.dtype) for k, v, _ in places} != {(x.dtype, x.dtype)}
            or cos.dtype not in layers.DTYPES or cos.dtype != sin.dtype or None in parts
            or slots.dtype != torch.int64 or not slots.is_contiguous()
            or len({k.stride() for k in keys}) > 1 or first.stride(3) != 1
            or len({v.stride() for v in values}) > 1 or values[0].stride(3) != 1
            or first.shape[3] % 2 or first.stride(2) % 2  # bfloat16 is read in pairs
        ):  # fmt: skip
            return None
        last = self.last and len(self.modules) - 1 not in hooked
        return self.layers(
            x, cos.contiguous(), sin.contiguous(), slots, keys, values, parts, self.scale, exact,
            scored if last else None, hooked,
        )  # fmt: skip


class Joined:
    """The layers of a network in runs, and what those were made of.  To look whether they still
    are takes no calls: they are what is saved here."""

    def __init__(self, network: Any) -> None:
        self.modules = list(network.layers)
        each = [
            (*PARTS(one), *(x for name, x in one.self_attn.named_children() if name in HEADS))
            for one in self.modules
        ]
        packed = [[_packed(linear) for linear in own[2:9]] for own in each]
        weights = list(map(_weights, self.modules, each, packed))
        self.runs = []
        kinds = [
            own and (parts[0].head_dim, parts[0].scaling, parts[9].weight.dtype, own[1].shape,
                     bool({*map(type, one._forward_hooks.values())} - {Recorder}) and one)
            for one, parts, own in zip(self.modules, each, weights, strict=True)
        ]  # fmt: skip
        for _, run in groupby(range(network.config.num_hidden_layers), kinds.__getitem__):
            at = list(run)
            self.runs.append(Run(*([own[i] for i in at] for own in (self.modules, each, weights))))
        parts = [part for own in each for part in own]
        self.packed = [one for own in packed for one in own if one is not None]
        self.made = [one.made for one in self.packed]
        joints = (*self.modules, *(part for own in each for part in own[:2]))
        self.children = [one._modules for one in joints]
        self.parts = [list(one.values()) for one in self.children]
        whole = [*self.modules, *parts]
        hooks = [one._forward_pre_hooks for one in whole] + [one._forward_hooks for one in parts]
        self.free, self.hooked = [x for x in hooks if not x], [x for x in hooks if x]
        self.hooked += [one._forward_hooks for one in self.modules]
        self.kinds = self._kinds()
        self.attributes = [one.__dict__ for one in whole]
        self.forwards = [one.get("forward") for one in self.attributes]
        self.owners = [one._parameters for own in each for one in own[2:]]
        self.present = [x for own in self.owners for x in own.values() if x is not None]
        self.counted = [x for x in self.present if not x.is_inference()]
        self.known = self._known()

    def holds(self, network: Any) -> bool:
        """Whether the layers of ``network`` are still these, with the same parts and weights."""
        return (
            list(network.layers) == self.modules
            and not any(self.free) and self._kinds() == self.kinds
            and [*map(list, map(dict.values, self.children))] == self.parts
            and [*map(dict.get, self.attributes, repeat("forward"))] == self.forwards
            and all(map(is_, map(attrgetter("made"), self.packed), self.made))
            and self._known() == self.known
        )  # fmt: skip

    def _kinds(self) -> list[list[type]]:
        """Of all hooks but those that record, which come and go and change nothing."""
        return [[k for k in map(type, own.values()) if k is not Recorder] for own in self.hooked]

    def _known(self) -> list[int]:
        """Which tensors there are, where each lies, and how often it was changed in place."""
        tensors = chain.from_iterable(map(dict.values, self.owners))
        versions = map(attrgetter("_version"), self.counted)
        return [*map(id, tensors), *map(torch.Tensor.data_ptr, self.present), *versions]


def _packed(linear: Any) -> Packed | QuantisedLinear | None:
    """What keeps a weight as the kernels multiply by it."""
    return linear if type(linear) is QuantisedLinear and linear.bare else packed_of(linear)


def _weights(layer: Any, parts: tuple[Any, ...], packed: list[Any]) -> list[Any] | None:
    """The packed weights, all of one kind; None where a part is not what `adopt` left."""
    own = [rotary._forward, mlp._forward, *repeat(norms._forward, len(parts) - 9)]
    kind = type(layer)
    if f"{kind.__module__}.{kind.__qualname__}" not in LAYERS or "forward" in layer.__dict__:
        return None
    for part, forward in zip((*parts[:2], *parts[9:]), own, strict=True):
        given = part.__dict__.get("forward")
        if type(given) is not partial or given.func is not forward:
            return None
    if (
        None in packed
        or type(parts[1].act_fn).__name__ not in mlp.SILU
        or any((layer._forward_pre_hooks, layer._forward_hooks_with_kwargs))
        or any(each._forward_hooks or each._forward_pre_hooks for each in parts)
    ):
        return None
    found = [
        each.parts(linear.weight) if isinstance(each, Packed) else each.parts()
        for linear, each in zip(parts[2:9], packed, strict=True)
    ]
    weights = [part for each in found for part in each or (None,)]
    one_kind = {*map(type, weights)} in ({Weight}, {Weight8}, {Weight4})
    return weights if one_kind and len(weights) == len(packed) else None
