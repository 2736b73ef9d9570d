"""The drafter's network while it drafts: it reads the verifier's hidden states once and keeps their
keys and values; a block's own are gone when the block is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantRotaryEmbedding,
)

from ...kernels.linear import Matrix
from .checkpoint import BlockCheckpoint

GROWTH = 256  # positions added at least when the kept keys and values are full


@dataclass
class TextKeys:
    """Keys and values of the text of one sequence, (layers, kv heads, room, D) each; ``length`` of
    them are in use."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add (layers, kv heads, n, D)."""
        end = self.length + keys.shape[2]
        if end > self.keys.shape[2]:
            room = max(end + GROWTH, 2 * self.keys.shape[2])
            self.keys, self.values = (
                F.pad(old, (0, 0, 0, room - old.shape[2])) for old in (self.keys, self.values)
            )
        self.keys[:, :, self.length : end] = keys
        self.values[:, :, self.length : end] = values
        self.length = end


@dataclass
class _Layer:
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # in, after, q, k
    window: int | None


class BlockNetwork:
    """The weights of a checkpoint on a device, in the order in which they are used."""

    def __init__(self, checkpoint: BlockCheckpoint, device: torch.device, dtype: torch.dtype):
        self.config = config = checkpoint.config
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
        rotary: Any = MuseGlimmerAssistantRotaryEmbedding(config)
        self.rotary = rotary.to(device)
        self.activation = F.silu if config.hidden_act == "silu" else F.gelu

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
        )  # fmt: skip

    def new_text(self) -> TextKeys:
        """Keys and values of a sequence of which nothing is known yet."""
        shape = (len(self.layers), self.kv_heads, 0, self.dim)
        empty = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return TextKeys(empty, empty.clone())

    @torch.inference_mode()
    def read(self, text: TextKeys, taps: torch.Tensor) -> None:
        """Take in the tapped hidden states (n, taps * H) of the next n tokens of a text."""
        n = len(taps)
        if n == 0:
            return
        known = _rms(self.fc(taps.to(self.device, self.dtype)), self.text_norm, self.eps)
        kv = self.text_kv(known).view(n, len(self.layers), 2, self.kv_heads, self.dim)
        keys, values = kv.permute(2, 1, 3, 0, 4)
        cos, sin = self._rotation(torch.arange(text.length, text.length + n))
        keys = _turn(_rms(keys, self.text_k_norm, self.eps), cos, sin)
        text.append(keys, values)

    @torch.inference_mode()
    def draft(self, texts: Sequence[TextKeys], blocks: torch.Tensor) -> torch.Tensor:
        """Hidden states (N, block, H) of one block behind each text; ``blocks`` (N, block, H) are
        the embeddings of anchors and masks."""
        count, size = blocks.shape[:2]
        places = torch.stack([torch.arange(t.length, t.length + size) for t in texts])
        cos, sin = (part[:, None] for part in self._rotation(places))
        x = blocks.to(self.device, self.dtype)
        split = [self.heads, self.kv_heads, self.kv_heads]
        for i, layer in enumerate(self.layers):
            before, after, q_norm, k_norm = layer.norms
            y = layer.qkv(_rms(x, before, self.eps))
            y = y.view(count, size, sum(split), self.dim).transpose(1, 2)
            q, k, v = torch.split(y, split, 1)
            q = _turn(_rms(q, q_norm, self.eps), cos, sin)
            k = _turn(_rms(k, k_norm, self.eps), cos, sin)
            seen = torch.stack([
                self._attend(q[n], k[n], v[n], text, i, layer.window)
                for n, text in enumerate(texts)
            ])  # fmt: skip
            x = x + layer.out(seen.transpose(1, 2).reshape(count, size, -1))
            gate, up = layer.gate_up(_rms(x, after, self.eps)).chunk(2, -1)
            x = x + layer.down(self.activation(gate) * up)
        return _rms(x, self.norm, self.eps)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, text: TextKeys, i: int,
        window: int | None,
    ) -> torch.Tensor:  # fmt: skip
        """(heads, block, D): every row of the block sees the text and the whole block."""
        keys = torch.cat([text.keys[i, :, : text.length], k], 1)
        values = torch.cat([text.values[i, :, : text.length], v], 1)
        mask = None
        if window is not None and keys.shape[1] > window + 1:
            at = torch.arange(keys.shape[1], device=self.device)
            mask = (at[-q.shape[1] :, None] - at[None]).abs() <= window
        return F.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
        )[0]

    def _rotation(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (..., D) of positions (...)."""
        flat = places.reshape(1, -1).to(self.device)
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        cos, sin = self.rotary(like, flat)
        return cos.view(*places.shape, -1), sin.view(*places.shape, -1)


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin
