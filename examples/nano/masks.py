"""Masked tokens from the rest of a text, or, for a causal model, every token from those before."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dllm.models.attention import attending
from dllm.train.network import ATTENTION


class Denoising(nn.Module):
    """Mean cross-entropy over the masked (``causal``: over all) answer tokens of a batch; end
    tokens after the first weigh ``tail_weight``."""

    def __init__(
        self, network: Any, mask_id: int, causal: bool, tail_weight: float, compiled: bool = False
    ) -> None:
        super().__init__()
        self.network, self.mask_id = network, mask_id
        self.causal, self.tail_weight = causal, tail_weight
        # no submodule: the same weights under other names
        self._forward = (torch.compile(network, dynamic=True) if compiled else network,)

    def forward(
        self, ids: torch.Tensor, answer: torch.Tensor, tail: torch.Tensor, seed: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """``loss`` of ``ids`` (B, L), where ``answer`` and ``tail`` (B, L) bool mark what has to be
        written and end tokens after the first."""
        weight = answer * torch.where(tail, self.tail_weight, 1.0)
        inputs, targets, mask = ids, ids, None
        if self.causal:
            inputs, targets, weight = ids[:, :-1], ids[:, 1:], weight[:, 1:]
            mask = torch.ones(inputs.shape[1], inputs.shape[1], dtype=torch.bool).tril()
            mask = mask.to(ids.device)[None, None]
        else:
            masked = draw_masks(answer, tail, torch.Generator().manual_seed(int(seed)))
            inputs, weight = torch.where(masked, self.mask_id, ids), weight * masked
        (network,) = self._forward
        with attending(self.network, ATTENTION):
            logits = network(input_ids=inputs, attention_mask=mask, use_cache=False).logits
        losses = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
        return {"loss": (losses * weight).sum() / weight.sum().clamp(min=1.0)}


def draw_masks(
    answer: torch.Tensor, tail: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """(B, L) bool: which answer tokens are hidden.

    Half of the rows hide each token with a probability drawn with density 2t; the others show the
    answer up to a uniform place and hide at least half of what follows.  Plain uniform ratios
    leave too many results visible a second time further right, and the model learns to copy them
    from there instead of computing them.
    """
    rows, device = len(answer), answer.device
    ratio, cut, late, kind = torch.rand(4, rows, 1, generator=generator).to(device)
    noise = torch.rand(answer.shape, generator=generator).to(device)
    place = answer.cumsum(1)  # 1 at the first answer token
    shown = cut * (answer & ~tail).sum(1, keepdim=True)
    suffix = (place > shown) & (noise < 1 - 0.5 * late)
    return answer & torch.where(kind < 0.5, noise < ratio.sqrt(), suffix)
