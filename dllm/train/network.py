"""A network while it is trained: what it predicts of every position, whatever its family.

Families differ in who sees whom and in whether a row predicts its own token or the next one.  Here
a text with masks goes in and logits come out that stand where the tokens stand.
"""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from ..core.errors import ConfigError
from ..models import DiffusionModel
from ..models.adapters import check_peft
from ..models.attention import attending
from ..models.family import Facts

ATTENTION = "dllm_train"


def train_attention(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """SDPA in the dtype of ``v``, beside which some families rotate in float32; on a CPU in
    float32, because its bfloat16 backward is an order of magnitude slower there.  Under a boolean
    mask; without one everybody sees everybody."""
    dtype = torch.float32 if v.device.type == "cpu" else v.dtype
    with torch.autocast(q.device.type, enabled=False):
        out = F.scaled_dot_product_attention(
            q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=mask, scale=scaling,
            enable_gqa=k.shape[1] != q.shape[1],
        )  # fmt: skip
    return out.transpose(1, 2).contiguous().to(v.dtype), None


AttentionInterface.register(ATTENTION, train_attention)


def has_adapter(model: DiffusionModel) -> bool:
    """Whether low-rank weights lie beside those of ``model``."""
    return bool(getattr(model.hf, "_hf_peft_config_loaded", False))


def check_trainable(model: DiffusionModel, rank: int = 0) -> None:
    """Raise `ConfigError` for a model that `Network` cannot train."""
    if has_adapter(model):
        raise ConfigError(
            f"{model.name} has an adapter already: load it anew, or with merge_adapter=True"
        )
    if model.facts.mask_token_id is None and rank:
        raise ConfigError(f"{model.name} has no mask token: `dllm train convert` gives it one")
    if model.facts.mask_kind == "causal_prefix":
        raise ConfigError(
            f"{model.name} counts its blocks from the end of each prompt, which training does "
            "not do: train it with its authors' code, or a model of another family"
        )


class Network(nn.Module):
    """The network of ``model``, trained whole (a copy) or by an adapter of ``rank``.

    ``teacher`` is asked by `teacher_logits`: another model, or by default the network as it was, a
    frozen copy or the same one without its adapter.
    """

    def __init__(
        self, model: DiffusionModel, rank: int = 0, teacher: DiffusionModel | None = None
    ) -> None:
        super().__init__()
        self.model, self.facts, self.rank = model, model.facts, rank
        hf: Any = model.hf
        hf.train(False)
        if not rank or not has_adapter(model):  # else an earlier round put it there
            check_trainable(model, rank)
            if rank:
                add_adapter(hf, rank, "all-linear")
        self.hf: Any = hf if rank else copy.deepcopy(hf).to(torch.float32).requires_grad_(True)
        if not rank:
            hf.requires_grad_(False)
        # no submodule: it is not saved
        self._frozen = (teacher or model,)

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
        return predict(self.hf, self.facts, ids, valid, clean)

    @torch.no_grad()
    def teacher_logits(self, ids: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        """`logits` of the teacher."""
        (teacher,) = self._frozen
        hf: Any = teacher.hf
        if hf is not self.hf:
            return predict(hf, teacher.facts, ids, valid)
        hf.disable_adapters()
        try:
            return predict(hf, teacher.facts, ids, valid)
        finally:
            hf.enable_adapters()

    def recompute(self) -> None:
        """Activations are not kept for the backward pass but computed again, by our attention."""
        self.hf.gradient_checkpointing_enable({
            "use_reentrant": False,
            "context_fn": lambda: (nullcontext(), attending(self.hf, ATTENTION)),
        })  # fmt: skip

    def snapshot(self) -> DiffusionModel:
        """The network as it is now, for decoding."""
        return self.model if self.rank else replace(self.model, hf=self.hf)


def add_adapter(hf: Any, rank: int, layers: str | list[str]) -> None:
    """Put a low-rank adapter on the named ``layers``, or all linear ones but the head, in place;
    only the adapter is trained, in float32."""
    check_peft()
    from peft import LoraConfig

    hf.requires_grad_(False)
    hf.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=layers))
    for parameter in hf.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def predict(
    hf: Any, facts: Facts, ids: torch.Tensor, valid: torch.Tensor | None,
    clean: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`Network.logits` of any network."""
    batch, length = ids.shape
    blocks = facts.block_length
    positions = torch.arange(length, device=ids.device)
    if clean is not None and blocks:
        seen: torch.Tensor | None = two_stream_mask(positions, blocks)
        inputs, positions = torch.cat([ids, clean], 1), positions.repeat(2)
    else:
        inputs, seen = ids, visible(facts, ids, positions)
    if valid is not None and not valid.all():
        keys = valid.repeat(1, inputs.shape[1] // length)[:, None, None, :]
        itself = torch.eye(inputs.shape[1], dtype=torch.bool, device=ids.device)
        seen = keys | itself if seen is None else (seen & keys) | itself
    with attending(hf, ATTENTION):
        logits: torch.Tensor = hf(
            input_ids=inputs, position_ids=positions.expand(batch, -1),
            attention_mask=None if seen is None else seen.expand(batch, 1, -1, -1), use_cache=False,
        ).logits[:, :length].float()  # fmt: skip
    return F.pad(logits, (0, 0, 1, 0))[:, :length] if facts.logit_shift else logits


def visible(facts: Facts, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
    """(1 or B, 1, L, L) bool: which row sees which key; None: all do."""
    causal = positions[:, None] >= positions
    if facts.mask_kind == "bidirectional":
        return None
    if facts.mask_kind == "block_causal":
        own = positions // (facts.block_length or 1)
        return (own[:, None] >= own)[None, None]
    if facts.mask_kind == "decided_first":
        masks: Any = ids == facts.mask_token_id
        first = masks[:, :, None] & ~masks[:, None, :]  # a mask sees every decided token
        same: Any = masks[:, :, None] == masks[:, None, :]
        return cast(torch.Tensor, (first | (same & causal))[:, None])
    return causal[None, None]


def two_stream_mask(positions: torch.Tensor, block: int) -> torch.Tensor:
    """(1, 1, 2L, 2L) bool of a text twice, with masks and without: a block with masks sees itself
    and the clean blocks before it, a clean one the clean ones up to itself."""
    own = positions // block
    before, same = own[:, None] > own, own[:, None] == own
    none = torch.zeros_like(same)
    top, bottom = torch.cat([same, before], 1), torch.cat([none, before | same], 1)
    return torch.cat([top, bottom])[None, None]
