"""Blocks of masks behind decided tokens, in a network whose adapter acts on the masks only.

Decided tokens see the base weights, and one another causally: what they compute is computed once,
without gradients, and is also the teacher.  A block of masks behind any of them sees the tokens
strictly before its place, and of itself what stands to the left; the k-th mask predicts the token
after it, as the rows of the autoregressive model do (I-DLM, arXiv 2604.11035; the drafts that
TiDAR, arXiv 2511.08923, reads off the forward that verifies).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache

from ...models.adapters import Gate
from ..dflash.model import blocks_attention
from ..network import attention

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


AttentionInterface.register(ATTENTION, partial(blocks_attention, causal=True))


class MaskBlocks(nn.Module):
    """Blocks of ``drafts`` masks anywhere in a text, in the network ``hf`` with its gated adapter:
    the blocks of a `Trainee`, and its reader of what the base weights say.  A mask at the place of
    an anchor predicts the token after it without having seen the anchor's."""

    def __init__(self, hf: Any, gate: Gate, drafts: int) -> None:
        super().__init__()
        self.adapter = nn.ParameterDict(
            {name.replace(".", "/"): p for name, p in hf.named_parameters() if p.requires_grad}
        )
        self._network = (hf,)  # no submodule, so that nobody saves it
        self.gate, self.drafts = gate, drafts
        self._text = DynamicCache()

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Last hidden states (B, S, H) of a text (B, S) by the base weights; keys and values are
        kept for `forward`.  Padding stands on the right, where it changes nothing before it."""
        (hf,) = self._network
        with attention(hf, "sdpa"):
            out = hf.base_model(input_ids=ids, use_cache=True)
        self._text = out.past_key_values
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def forward(self, ids: torch.Tensor, _: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Hidden states (B, N, drafts, H) of blocks whose first mask stands at ``anchors`` (B, N)
        of the texts ``ids`` (B, S) that were read last."""
        (hf,), (batch, count) = self._network, anchors.shape
        places = anchors[..., None] + torch.arange(self.drafts, device=anchors.device)
        seen = torch.arange(ids.shape[1], device=anchors.device) < anchors[..., None]
        masks = torch.full_like(places.flatten(1), self.gate.mask_token_id)
        with attention(hf, ATTENTION):
            out = hf.base_model(
                input_ids=masks, position_ids=places.flatten(1),
                attention_mask=seen[:, :, None], past_key_values=Behind(self._text),
                use_cache=False,
            )  # fmt: skip
        hidden: torch.Tensor = out.last_hidden_state
        return hidden.view(batch, count, self.drafts, -1)
