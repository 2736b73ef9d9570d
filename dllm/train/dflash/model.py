"""The drafter network while it is trained: many blocks of one text in one forward.

The network is transformers' own class.  Only its attention is exchanged: in training a forward
holds many blocks at random anchors; each sees the text before its anchor, and itself alone.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from ...core.errors import ConfigError

ATTENTION = "dllm_blocks_of_drafts"
NO_ROTATION_KNOWN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}


def blocks_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor, scaling: float, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of N blocks of rows over the text and, each, over itself.

    ``query`` (B, heads, N * block, D); ``key`` and ``value`` (B, kv heads, S + N * block, D), the
    text first; ``attention_mask`` (B, N, 1 or block, S) is true where a row sees the text.  The
    scores of other blocks, which no block sees, are never computed.
    """
    batch, blocks, text = (attention_mask.shape[i] for i in (0, 1, 3))
    kv_heads, size, dim = key.shape[1], query.shape[2] // blocks, query.shape[-1]
    groups = query.shape[1] // kv_heads
    # (B, kv, N, groups * block, D): all rows that share keys together
    q = query.view(batch, kv_heads, groups, blocks, size, dim).transpose(2, 3)
    q = q.reshape(batch, kv_heads, blocks, groups * size, dim)
    own_k = key[:, :, text:].reshape(batch, kv_heads, blocks, size, dim)
    own_v = value[:, :, text:].reshape(batch, kv_heads, blocks, size, dim)
    far = q.flatten(2, 3) @ key[:, :, :text].transpose(-1, -2)
    far = far.view(batch, kv_heads, blocks, groups, size, text) * scaling
    far = far.masked_fill(~attention_mask[:, None, :, None], torch.finfo(far.dtype).min)
    far = far.flatten(3, 4)
    near = (q @ own_k.transpose(-1, -2)) * scaling
    weights = torch.cat([far, near], -1).softmax(-1, dtype=torch.float32).to(query.dtype)
    seen = weights[..., :text].flatten(2, 3) @ value[:, :, :text]
    out = seen.view_as(q) + weights[..., text:] @ own_v
    out = out.view(batch, kv_heads, blocks, groups, size, dim).permute(0, 2, 4, 1, 3, 5)
    return out.reshape(batch, blocks * size, kv_heads * groups, dim), None


AttentionInterface.register(ATTENTION, blocks_attention)


def default_target_layer_ids(layers: int, count: int) -> list[int]:
    """Layers of the verifier to read, spread as DFlash does: ``count`` of ``layers``."""
    if count == 1:
        return [layers // 2]
    return [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]


def drafter_config(
    verifier: Any, *, layers: int = 4, block_size: int = 8, mask_token_id: int,
    target_layer_ids: Sequence[int] | None = None, sliding_window: int | None = None,
) -> MuseGlimmerAssistantConfig:  # fmt: skip
    """Shape of a drafter for a verifier with the config ``verifier``: its width, heads and
    rotary embedding; ``target_layer_ids`` default to as many layers as the drafter has."""
    text = verifier.get_text_config()
    read = list(target_layer_ids or default_target_layer_ids(text.num_hidden_layers, layers))
    last = text.num_hidden_layers - 1  # its output: engines disagree whether it is normed
    if not all(0 <= layer < last for layer in read):
        raise ConfigError(
            f"target_layer_ids are layers before the last, 0 to {last - 1}, not {read}"
        )
    if block_size < 2 or layers < 1:
        raise ConfigError("a drafter has at least one layer and blocks of at least 2 positions")
    kind = "full_attention" if sliding_window is None else "sliding_attention"
    heads = text.num_attention_heads
    rope: Any = getattr(text, "rope_parameters", None) or NO_ROTATION_KNOWN
    rope = rope.get("full_attention", rope)  # some have one per kind of layer
    return MuseGlimmerAssistantConfig(
        hidden_size=text.hidden_size, intermediate_size=text.intermediate_size,
        num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5), rope_parameters=dict(rope),
        max_position_embeddings=text.max_position_embeddings,
        sliding_window=sliding_window or 2048, layer_types=[kind] * layers, hidden_act="silu",
        bos_token_id=None, eos_token_id=None, pad_token_id=None, block_size=block_size,
        mask_token_id=mask_token_id, target_layer_ids=read,
    )  # fmt: skip


def new_drafter(config: MuseGlimmerAssistantConfig) -> MuseGlimmerAssistantModel:
    """A drafter with random weights, ready for training."""
    model: Any = MuseGlimmerAssistantModel(config)
    model.set_attn_implementation(ATTENTION)
    return cast(MuseGlimmerAssistantModel, model.float())


@torch.no_grad()
def copy_layers(drafter: Any, verifier: Any, gain: float = 2.0) -> None:
    """Start with the verifier's last layers and its final norm instead of random weights.

    The projection of the hidden states starts as the last of them under the norm of the layer after
    it, so that keys and values are close to those the copied layers know.  ``gain``: the size of
    queries and keys where the verifier does not norm them; the drafter's norms would set it to 1.
    Raises `ConfigError` for too few layers, other parts, or norms of another kind (Gemma).
    """
    source = verifier.get_decoder()
    count, width = len(drafter.layers), drafter.config.hidden_size
    other = ConfigError("the verifier's layers have another form: start from random weights")
    if len(getattr(source, "layers", ())) < count or not hasattr(source, "norm"):
        raise other
    for layer, old in zip(drafter.layers, source.layers[-count:], strict=True):
        new = layer.state_dict()
        kept = {name: value for name, value in old.state_dict().items() if name in new}
        odd = [name for name in kept if kept[name].shape != new[name].shape]
        lost = [name for name in old.state_dict() if name not in new and "norm" in name]
        if odd or lost or len(kept) < 9:
            raise other
        layer.load_state_dict(kept, strict=False)
        if "self_attn.q_norm.weight" not in kept:
            layer.self_attn.q_norm.weight.fill_(gain)
            layer.self_attn.k_norm.weight.fill_(gain)
    drafter.norm.weight.copy_(source.norm.weight)
    row = torch.linspace(-1, 1, width)
    there = source.norm(row.to(source.norm.weight)).to(row)
    if not torch.allclose(drafter.norm(row), there, rtol=0.02, atol=1e-3):
        raise other
    drafter.encoder.fc.weight[:, -width:] += torch.eye(width)
    after = min(drafter.config.target_layer_ids[-1] + 1, len(source.layers) - 1)
    drafter.encoder.output_norm_enc.weight.copy_(source.layers[after].input_layernorm.weight)


class BlockDrafter(nn.Module):
    """A drafter with the verifier's frozen embedding, times the ``scale`` it is read with (Gemma):
    hidden states of many blocks at once.  All rows but the anchor's draft."""

    def __init__(
        self, drafter: MuseGlimmerAssistantModel, embedding: torch.Tensor, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.drafter, self.scale = drafter, scale
        self.embedding: torch.Tensor
        self.register_buffer("embedding", embedding, persistent=False)

    @property
    def drafts(self) -> int:
        """Rows of a block that draft: the k-th of them the k-th token behind the anchor."""
        return self.drafter.config.block_size - 1

    def forward(
        self, ids: torch.Tensor, states: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states (B, N, drafts, H) of blocks that start at ``anchors`` (B, N).

        ``ids`` (B, S) and ``states`` (B, S, layers * H) are the text; a block sees what stands
        strictly before its anchor, whose own state does not exist yet when it is drafted.
        """
        config = self.drafter.config
        size, (batch, count) = config.block_size, anchors.shape
        mask = self.embedding[config.mask_token_id]
        blocks = mask.to(torch.float32).expand(batch, count, size, -1).clone()
        blocks[:, :, 0] = F.embedding(ids.gather(1, anchors), self.embedding).to(blocks.dtype)
        blocks *= self.scale
        text = torch.arange(ids.shape[1], device=ids.device)
        places = anchors[..., None] + torch.arange(size, device=ids.device)
        seen = (text < anchors[..., None])[:, :, None]
        near = seen & (places[..., None] - text <= config.sliding_window)
        out = self.drafter(
            noise_embeds=blocks.flatten(1, 2), context_hidden_states=states.to(blocks.dtype),
            position_ids=torch.cat([text.expand(batch, -1), places.flatten(1)], 1),
            attention_mask={"full_attention": seen, "sliding_attention": near}, use_cache=False,
        )  # fmt: skip
        hidden: torch.Tensor = out.last_hidden_state
        return hidden.view(batch, count, size, -1)[:, :, 1:]
