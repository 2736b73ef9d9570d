"""A network while it is trained: what it predicts of every position, whatever its family.

Families differ in who sees whom and in whether a row predicts its own token or the next one.  Here
a text with masks goes in and logits come out that stand where the tokens stand.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from ..errors import ConfigError
from ..models import DiffusionModel

ATTENTION = "dllm_train"
LINEARS = "all-linear"  # peft's name for every linear layer but the head


def train_attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """SDPA under a boolean mask; on a CPU in float32, because its bfloat16 backward is an order of
    magnitude slower there.  Without a mask everybody sees everybody."""
    if q.device.type == "cpu":
        q, k, v = q.float(), k.float(), v.float()
    with torch.autocast(q.device.type, enabled=False):
        out = F.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, scale=scaling,
            enable_gqa=k.shape[1] != q.shape[1],
        )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, train_attention)


class Network(nn.Module):
    """The network of ``model``, trained whole (a copy) or by an adapter of ``rank``.

    ``teacher`` is the network as it was: a frozen copy, or the same one without its adapter.
    ``alpha``: the adapter's scale times its rank.
    """

    def __init__(self, model: DiffusionModel, rank: int = 0, alpha: float | None = None) -> None:
        super().__init__()
        if model.facts.mask_token_id is None and rank:
            raise ConfigError(f"{model.name} has no mask token: `dllm train convert` gives it one")
        self.model, self.facts, self.rank = model, model.facts, rank
        self.hf: Any = copy.deepcopy(model.hf) if not rank else model.hf
        self._frozen: tuple[Any, ...] = (model.hf,)  # no submodule: it is not saved
        if rank:
            from peft import LoraConfig

            self.hf.requires_grad_(False)
            self.hf.add_adapter(
                LoraConfig(r=rank, lora_alpha=int(alpha or rank), target_modules=LINEARS)
            )
        else:
            own: Any = self.hf
            own.to(torch.float32).requires_grad_(True)
        model.hf.train(False)
        if not rank:
            model.hf.requires_grad_(False)

    @property
    def mask_id(self) -> int:
        assert self.facts.mask_token_id is not None
        return self.facts.mask_token_id

    def logits(
        self, ids: torch.Tensor, valid: torch.Tensor | None = None,
        clean: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Float logits (B, L, V) for the token at every position of ``ids`` (B, L).

        ``valid`` (B, L) bool: false for padding.  Models whose attention is causal between blocks
        also take the ``clean`` text (B, L): what stands before a block is seen without its masks,
        as when decoding (BD3LM, arXiv 2503.09573).
        """
        return self._logits(self.hf, ids, valid, clean)

    @torch.no_grad()
    def teacher_logits(
        self, ids: torch.Tensor, valid: torch.Tensor | None = None,
        clean: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`logits` of the network as it was before."""
        (hf,) = self._frozen
        if not self.rank:
            return self._logits(hf, ids, valid, clean)
        hf.disable_adapters()
        try:
            return self._logits(hf, ids, valid, clean)
        finally:
            hf.enable_adapters()

    def _logits(
        self, hf: Any, ids: torch.Tensor, valid: torch.Tensor | None, clean: torch.Tensor | None
    ) -> torch.Tensor:
        batch, length = ids.shape
        blocks = self.facts.block_length
        doubled = clean is not None and bool(blocks)
        positions = torch.arange(length, device=ids.device)
        if doubled:
            assert clean is not None and blocks
            seen: torch.Tensor | None = two_stream_mask(positions, blocks)
            inputs, positions = torch.cat([ids, clean], 1), positions.repeat(2)
        else:
            inputs, seen = ids, self._seen(ids, positions)
        if valid is not None and not valid.all():
            keys = (valid.repeat(1, 2) if doubled else valid)[:, None, None, :]
            itself = torch.eye(inputs.shape[1], dtype=torch.bool, device=ids.device)
            seen = keys | itself if seen is None else (seen & keys) | itself
        with attention(hf, ATTENTION):
            logits: torch.Tensor = hf(
                input_ids=inputs, position_ids=positions.expand(batch, -1),
                attention_mask=None if seen is None else seen.expand(batch, 1, -1, -1),
                use_cache=False,
            ).logits[:, :length].float()  # fmt: skip
        if self.facts.logit_shift:
            logits = F.pad(logits, (0, 0, 1, 0))[:, :length]
        return logits

    def _seen(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """(1 or B, 1, L, L) bool: which row sees which key; None: all do."""
        kind, causal = self.facts.mask_kind, positions[:, None] >= positions
        if kind == "bidirectional":
            return None
        if kind == "block_causal":
            own = positions // (self.facts.block_length or 1)
            earlier: torch.Tensor = own[:, None] >= own
            return earlier[None, None]
        if kind == "decided_first":
            masks: torch.Tensor = ids == self.mask_id
            first = masks[:, :, None] & ~masks[:, None, :]  # a mask sees every decided token
            same = masks[:, :, None] == masks[:, None, :]
            return (first | (same & causal))[:, None]
        return causal[None, None]

    def snapshot(self) -> DiffusionModel:
        """The network as it is now, for decoding."""
        return self.model if self.rank else replace(self.model, hf=self.hf)


def two_stream_mask(positions: torch.Tensor, block: int) -> torch.Tensor:
    """(1, 1, 2L, 2L) bool of a text twice, with masks and without: a block with masks sees itself
    and the clean blocks before it, a clean one the clean ones up to itself."""
    own = positions // block
    before, same = own[:, None] > own, own[:, None] == own
    none = torch.zeros_like(same)
    top, bottom = torch.cat([same, before], 1), torch.cat([none, before | same], 1)
    return torch.cat([top, bottom])[None, None]


@contextmanager
def attention(hf: Any, name: str) -> Iterator[None]:
    """The network with another attention implementation."""
    before = hf.config._attn_implementation
    hf.config._attn_implementation = name
    try:
        yield
    finally:
        hf.config._attn_implementation = before
