"""The drafter's network while it drafts: it reads the verifier's hidden states once and keeps their
keys and values; a block's own are gone when the block is drafted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.muse_glimmer_assistant import modeling_muse_glimmer_assistant as theirs

from ...kernels.activations import gelu, silu
from ...kernels.cpu.layers import Layers, Part, rms_norm, suits
from ...kernels.cpu.products import Weight
from ...kernels.linear import Matrix, Packed
from ..verifiers.packed import ANY_LENGTH
from .checkpoint import BlockCheckpoint

GROWTH = 256  # positions added at least when the kept keys and values are full


@dataclass
class TextKeys:
    """Keys and values of one text, (layers, kv heads, room, D) each; ``length`` are in use."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0

    def reserve(self, n: int) -> int:
        """Make room for ``n`` positions behind those in use; where they end."""
        end = self.length + n
        if end > self.keys.shape[2]:
            room = max(end + GROWTH, 2 * self.keys.shape[2])
            self.keys, self.values = (
                F.pad(old, (0, 0, 0, room - old.shape[2])) for old in (self.keys, self.values)
            )
        return end

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add (layers, kv heads, n, D)."""
        end = self.reserve(keys.shape[2])
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end


@dataclass
class Convolution:
    """DFlash 2's dynamic convolution around a sublayer: what goes in gives the kernels of both
    ends.  ``base`` (2, size, H), ``kernels`` (.., H) -> (.., 2 * size * groups)."""

    base: torch.Tensor
    kernels: Callable[[torch.Tensor], torch.Tensor]

    def around(
        self, x: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """``sublayer`` of ``x`` (N, block, H), with both convolved."""
        dynamic = self.kernels(x).view(*x.shape[:-1], 2, self.base.shape[1], -1)
        out = sublayer(convolve(x, dynamic[..., 0, :, :], self.base[0]))
        return convolve(out, dynamic[..., 1, :, :], self.base[1])


@dataclass
class _Layer:
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # in, after, q, k
    window: int | None
    convolutions: tuple[Convolution, Convolution] | None  # around attention and MLP


def convolve(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Each row of a block with the rows before it: y[i] = sum over t of
    (base[t] + dynamic[i, t]) * x[i - t], nothing before the first row.

    ``x`` (N, block, H), ``base`` (size, H), ``dynamic`` (N, block, size, groups), where a group of
    neighbouring channels shares a number.
    """
    size, groups = dynamic.shape[-2:]
    x = x.reshape(*x.shape[:-1], groups, -1)
    kernel = base.to(x.dtype).view(size, groups, -1) + dynamic[..., None]
    out = x * kernel[:, :, 0]
    for back in range(1, size):
        out = out + F.pad(x[:, :-back] * kernel[:, back:, back], (0, 0, 0, 0, back, 0))
    return out.flatten(-2)


class BlockNetwork:
    """The weights of a checkpoint on a device, in the order in which they are used."""

    def __init__(self, checkpoint: BlockCheckpoint, device: torch.device, dtype: torch.dtype):
        self.config = config = checkpoint.config
        self.variant = checkpoint.variant
        self.device, self.dtype, self.eps = device, dtype, config.rms_norm_eps
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim, self.size = config.head_dim, config.block_size
        w = {name: t.to(device, dtype) for name, t in checkpoint.weights.items()}
        self.fc = Matrix(w["encoder.fc.weight"])
        self.text_norm = w["encoder.output_norm_enc.weight"]
        self.norm = w["norm.weight"]
        self.layers = [self._layer(w, i) for i in range(config.num_hidden_layers)]
        kv = self.kv_heads * self.dim
        self.text_kv = Matrix(torch.cat([layer.qkv.weight[-2 * kv :] for layer in self.layers]))
        self.text_k_norm = torch.stack([layer.norms[3] for layer in self.layers])[:, None, None]
        self.rotary = theirs.MuseGlimmerAssistantRotaryEmbedding(config).to(device)
        self.turns = torch.empty(2, 0, self.dim, dtype=dtype, device=device)  # by position
        self.activation = silu if config.hidden_act == "silu" else gelu

    def _layer(self, w: dict[str, torch.Tensor], i: int) -> _Layer:
        def of(name: str) -> torch.Tensor:
            return w[f"layers.{i}.{name}.weight"]

        kinds = self.config.layer_types or []
        return _Layer(
            Matrix(torch.cat([of(f"self_attn.{name}_proj") for name in "qkv"])),
            Matrix(of("self_attn.o_proj")),
            Matrix(torch.cat([of("mlp.gate_proj"), of("mlp.up_proj")])),
            Matrix(of("mlp.down_proj")),
            (of("input_layernorm"), of("post_attention_layernorm"), of("self_attn.q_norm"),
             of("self_attn.k_norm")),
            self.config.sliding_window if kinds[i] == "sliding_attention" else None,
            None if not self.variant.conv_kernel_size else (
                self._convolution(w, f"layers.{i}.attention_conv."),
                self._convolution(w, f"layers.{i}.mlp_conv."),
            ),
        )  # fmt: skip

    def _convolution(self, w: dict[str, torch.Tensor], name: str) -> Convolution:
        return Convolution(w[name + "base_kernel"], Matrix(w[name + "kernel_projection.weight"]))

    @cached_property
    def compiled(self) -> Layers | None:
        """The layers by compiled kernels, in one call; None where these do not compute them."""
        norms = [layer.norms for layer in self.layers]
        if (
            self.variant.conv_kernel_size or self.variant.causal or self.activation is not silu
            or self.dim % 2 or not suits(*(norm for own in norms for norm in own))
        ):  # fmt: skip
            return None
        weights = []
        outputs = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        for layer in self.layers:
            split = [*torch.split(layer.qkv.weight, outputs), layer.out.weight]
            split += [*layer.gate_up.weight.chunk(2), layer.down.weight]
            parts = [part for weight in split for part in Packed().parts(weight) or ()]
            if len(parts) != 7 or {*map(type, parts)} != {Weight}:
                return None
            weights.append(parts)
        return Layers(weights, [[None] * 7] * len(norms), norms, [[self.eps] * 4] * len(norms))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "compiled"}

    def new_text(self) -> TextKeys:
        """Keys and values of a sequence of which nothing is known yet."""
        shape = (len(self.layers), self.kv_heads, 0, self.dim)
        empty = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return TextKeys(empty, empty.clone())

    @torch.inference_mode()
    def read(self, text: TextKeys, states: torch.Tensor) -> None:
        """Take in the verifier's hidden states (n, layers * H) of the next n tokens of a text."""
        n = len(states)
        if n == 0:
            return
        known = _rms(self.fc(states.to(self.device, self.dtype)), self.text_norm, self.eps)
        kv = self.text_kv(known).view(n, len(self.layers), 2, self.kv_heads, self.dim)
        keys, values = kv.permute(2, 1, 3, 0, 4)
        cos, sin = self._rotation([text], n)
        keys = _turn(_rms(keys, self.text_k_norm, self.eps), cos[0], sin[0])
        text.append(keys, values)

    @torch.inference_mode()
    def draft(self, texts: Sequence[TextKeys], blocks: torch.Tensor) -> torch.Tensor:
        """Hidden states (N, block, H) of one block behind each text; ``blocks`` (N, block, H) are
        the embeddings of anchors and masks."""
        if self.compiled is not None and len(texts) > 1:
            return torch.cat([self.draft([t], blocks[n : n + 1]) for n, t in enumerate(texts)])
        ends = [text.reserve(blocks.shape[1]) for text in texts]
        cos, sin = self._rotation(texts, blocks.shape[1])
        x = blocks.to(self.device, self.dtype)
        masks = (self._mask(texts[0], x.shape[1], layer.window) for layer in self.layers)
        if self.compiled is not None and all(mask is None for mask in masks):
            part = Part(count=x.shape[1], rows=1, length=ends[0])
            results = self.compiled(
                x.contiguous(), cos, sin, torch.arange(texts[0].length, ends[0]),
                torch.split(texts[0].keys, 1), torch.split(texts[0].values, 1), [part],
                self.dim**-0.5, False,
            )  # fmt: skip
            assert results is not None
            return _rms(results[-1], self.norm, self.eps)
        for i, layer in enumerate(self.layers):

            def attention(y: torch.Tensor, i: int = i, layer: _Layer = layer) -> torch.Tensor:
                return self._attention(y, texts, i, layer, cos[:, None], sin[:, None])

            def mlp(y: torch.Tensor, layer: _Layer = layer) -> torch.Tensor:
                gate, up = layer.gate_up(y).chunk(2, -1)
                return layer.down(self.activation(gate) * up)

            y, z = _rms(x, layer.norms[0], self.eps), layer.convolutions
            x = x + (attention(y) if z is None else z[0].around(y, attention))
            y = _rms(x, layer.norms[1], self.eps)
            x = x + (mlp(y) if z is None else z[1].around(y, mlp))
        return _rms(x, self.norm, self.eps)

    def _attention(
        self, x: torch.Tensor, texts: Sequence[TextKeys], i: int, layer: _Layer,
        cos: torch.Tensor, sin: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Self-attention of layer ``i`` over ``x`` (N, block, H), normed."""
        split = [self.heads, self.kv_heads, self.kv_heads]
        y = layer.qkv(x).view(*x.shape[:2], sum(split), self.dim).transpose(1, 2)
        q, k, v = torch.split(y, split, 1)
        q = _turn(_rms(q, layer.norms[2], self.eps), cos, sin)
        k = _turn(_rms(k, layer.norms[3], self.eps), cos, sin)
        seen = []
        for n, text in enumerate(texts):  # the rows of a block over its text and the block
            end = text.length + x.shape[1]
            keys, values = text.keys[i, None, :, :end], text.values[i, None, :, :end]
            keys[0, :, text.length :], values[0, :, text.length :] = k[n], v[n]
            mask = self._mask(text, x.shape[1], layer.window)
            seen.append(F.scaled_dot_product_attention(
                q[n, None], keys, values, attn_mask=mask, enable_gqa=True
            ))  # fmt: skip
        return layer.out(torch.cat(seen).transpose(1, 2).reshape(*x.shape[:2], -1))

    def _mask(self, text: TextKeys, block: int, window: int | None) -> torch.Tensor | None:
        """What the rows of a block see, (block, text and block), None for everything: in causal
        layers the rows up to their own, in sliding layers what their window says."""
        variant, length = self.variant, text.length + block
        causal = variant.causal if window is None else variant.causal_windows
        if not causal and (window is None or length <= window + 1):
            return None
        at = torch.arange(length, device=self.device)
        rows = at[text.length :, None]
        start = rows[:1].expand_as(rows) if variant.anchored_windows else rows
        reach = length if window is None else window
        mask = start - at <= reach
        if causal:
            mask = mask & (at <= rows)
        elif not variant.anchored_windows:
            mask = mask & (at - rows <= reach)
        return mask

    def _rotation(self, texts: Sequence[TextKeys], n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (N, n, D) of the next ``n`` positions of each text."""
        end = max(text.length for text in texts) + n
        turns, fixed = self.turns, self.rotary.rope_type in ANY_LENGTH
        if end > turns.shape[1] or not fixed:
            places = torch.arange(2 * end if fixed else end, device=self.device)
            cos, sin = self.rotary(turns[0], places[None])
            self.turns = turns = torch.cat([cos, sin])
        result = torch.stack([turns[:, t.length : t.length + n] for t in texts], 1)
        return result[0], result[1]


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dim() == 1 and suits(x, weight):
        return rms_norm(x, weight, eps)
    return weight * F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
