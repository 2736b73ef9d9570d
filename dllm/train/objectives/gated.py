"""Blocks of masks behind decided tokens, in a network whose adapter acts on the masks only.

Decided tokens see the base weights, and one another causally: what they compute is computed once,
without gradients, and is also the teacher.  A block of masks behind any of them sees the tokens
strictly before its place, and of itself what stands to the left; the k-th mask predicts the token
after it, as the rows of the autoregressive model do (I-DLM, arXiv 2604.11035; the drafts that
TiDAR, arXiv 2511.08923, reads off the forward that verifies).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache

from ...models.adapters import Gate
from ..dflash.loss import FrozenHeadLoss, dpace_weights, sampled_rows
from ..dflash.objective import Objective

ATTENTION = "dllm_blocks_of_masks"


class Behind:
    """Keys and values of the text, as a cache that does not grow: (B, kv heads, S, D) per layer."""

    def __init__(self, text: DynamicCache) -> None:
        self.text = text

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The text's, then the masks'."""
        layer: Any = self.text.layers[layer_idx]
        return torch.cat([layer.keys, key], 2), torch.cat([layer.values, value], 2)

    def get_seq_length(self, *_: Any) -> int:
        return 0


def masks_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor, scaling: float, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of N blocks of n rows over the text and, causally, each over itself.

    ``query`` (B, heads, N * n, D); ``key`` and ``value`` (B, kv heads, S + N * n, D), the text
    first; ``attention_mask`` (B, N, 1, S) is true where a block sees the text.
    """
    batch, blocks, text = (attention_mask.shape[i] for i in (0, 1, 3))
    kv, dim = key.shape[1], query.shape[-1]
    groups, size = query.shape[1] // kv, query.shape[2] // blocks
    # (B, kv, N, groups * n, D): all rows that share keys together
    q = query.view(batch, kv, groups, blocks, size, dim).transpose(2, 3)
    q = q.reshape(batch, kv, blocks, groups * size, dim)
    own_k = key[:, :, text:].reshape(batch, kv, blocks, size, dim)
    own_v = value[:, :, text:].reshape(batch, kv, blocks, size, dim)
    lowest = torch.finfo(q.dtype).min
    far = q.flatten(2, 3) @ key[:, :, :text].transpose(-1, -2)
    far = far.view(batch, kv, blocks, groups * size, text) * scaling
    far = far.masked_fill(~attention_mask[:, None], lowest)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1).repeat(groups, 1)
    near = ((q @ own_k.transpose(-1, -2)) * scaling).masked_fill(later, lowest)
    weights = torch.cat([far, near], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
    seen = weights[..., :text].flatten(2, 3) @ value[:, :, :text]
    out = seen.view_as(q) + weights[..., text:] @ own_v
    out = out.view(batch, kv, blocks, groups, size, dim).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(batch, blocks * size, kv * groups, dim), None


AttentionInterface.register(ATTENTION, masks_attention)


class MaskBlocks(nn.Module):
    """Blocks of ``size`` masks anywhere in a text: the network ``hf`` with its gated adapter."""

    def __init__(self, hf: Any, gate: Gate, size: int) -> None:
        super().__init__()
        self.adapter = nn.ParameterDict(
            {name.replace(".", "/"): p for name, p in hf.named_parameters() if p.requires_grad}
        )
        self._network = (hf,)  # no submodule, so that nobody saves it
        self.gate, self.size = gate, size

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> tuple[DynamicCache, torch.Tensor]:
        """Keys and values of a text (B, S), and its last hidden states (B, S, H), by the base
        weights; padding stands on the right, where it has no influence on what is before."""
        decoder = self._decoder("sdpa")
        out = decoder(input_ids=ids, use_cache=True)
        return out.past_key_values, out.last_hidden_state

    def forward(self, text: DynamicCache, length: int, anchors: torch.Tensor) -> torch.Tensor:
        """Hidden states (B, N, size, H) of blocks whose first mask stands at ``anchors`` (B, N) of
        texts of ``length`` positions."""
        batch, count = anchors.shape
        places = anchors[..., None] + torch.arange(self.size, device=anchors.device)
        seen = torch.arange(length, device=anchors.device) < anchors[..., None]
        decoder = self._decoder(ATTENTION)
        masks = torch.full_like(places.flatten(1), self.gate.mask_token_id)
        out = decoder(
            input_ids=masks, position_ids=places.flatten(1), attention_mask=seen[:, :, None],
            past_key_values=Behind(text), use_cache=False,
        )  # fmt: skip
        hidden: torch.Tensor = out.last_hidden_state
        return hidden.view(batch, count, self.size, -1)

    def _decoder(self, attention: str) -> Any:
        (hf,) = self._network
        hf.config._attn_implementation = attention
        return hf.base_model


class Gated(nn.Module):
    """What a step minimises: every mask towards the token after it, and towards what the base
    weights say there."""

    walk = None

    def __init__(
        self, hf: Any, gate: Gate, size: int, objective: Objective, common: torch.Tensor
    ) -> None:
        super().__init__()
        self.blocks = MaskBlocks(hf, gate, size)
        self.objective = objective
        self.head: torch.Tensor
        self.common: torch.Tensor
        head = hf.get_output_embeddings().weight.detach()
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("common", common, persistent=False)

    def forward(
        self, ids: torch.Tensor, length: torch.Tensor, anchors: torch.Tensor, seed: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """``loss`` of a batch as `data.collate` makes it."""
        text, states = self.blocks.read(ids)
        hidden = self.blocks(text, ids.shape[1], anchors.clamp_min(0))
        places = anchors[..., None] + torch.arange(1, hidden.shape[2] + 1, device=ids.device)
        counted = (anchors[..., None] >= 0) & (places < length[:, None, None])
        labels = torch.where(counted, ids.gather(1, places.flatten(1).clamp_max(ids.shape[1] - 1))
                             .view_as(places), 0)  # fmt: skip
        generator = torch.Generator().manual_seed(int(seed))
        rows, index = sampled_rows(
            labels[counted], self.common, len(self.head), self.objective.random_rows, generator
        )
        batch = torch.arange(len(ids), device=ids.device)[:, None, None].expand_as(places)
        teacher = states[batch[counted], places[counted] - 1]
        losses, q = FrozenHeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden[counted], self.head[rows], index, teacher, self.objective.soft,
            self.objective.chunk,
        )  # fmt: skip
        counted = counted.flatten(0, 1)
        table = torch.zeros_like(counted, dtype=torch.float32)
        weights = dpace_weights(table.masked_scatter(counted, q.detach()), counted)
        return {"loss": (losses * weights[counted]).sum() / weights.sum()}

    def drafts(self, ids: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Most probable tokens (B, N, size) behind every anchor."""
        text, _ = self.blocks.read(ids)
        hidden = self.blocks(text, ids.shape[1], anchors.clamp_min(0))
        return torch.stack(
            [(h.to(self.head.dtype) @ self.head.T).argmax(-1) for h in hidden.flatten(0, 1)]
        ).view(hidden.shape[:-1])
