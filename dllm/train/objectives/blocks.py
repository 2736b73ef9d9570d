"""An autoregressive model becomes a block-diffusion model; its frozen copy is the teacher.

OPDLM (arXiv 2606.06712): the student, the same weights with attention that is causal between
blocks, writes a text by denoising.  Some tokens of each block are masked again; what the student
says of them is pulled to what the frozen autoregressive model says behind the same finished text
(forward Kullback-Leibler divergence over the whole vocabulary).
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..network import Network
from .parallel import NEVER, divergence


@dataclass(frozen=True)
class BlockSettings:
    """There is nothing to set.  End tokens are learnt, which OPDLM leaves out."""


class Blocks(nn.Module):
    """The objective; batches as those of `parallel.Parallel`."""

    def __init__(self, network: Network, settings: BlockSettings) -> None:
        super().__init__()
        self.network, self.settings = network, settings

    def forward(
        self, ids: torch.Tensor, order: torch.Tensor, valid: torch.Tensor, progress: torch.Tensor,
        seed: torch.Tensor,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """``loss`` of a batch."""
        generator = torch.Generator().manual_seed(int(seed))
        own = torch.arange(ids.shape[1]) // (self.network.facts.block_length or 1)
        ratio = torch.rand(len(ids), int(own[-1]) + 1, generator=generator)[:, own]
        noise = torch.rand(ids.shape, generator=generator)
        masked = (order >= 0) & (noise < ratio).to(ids.device)
        noisy = torch.where(masked, self.network.mask_id, ids)
        learnt = masked & (order < NEVER)
        student = self.network.logits(noisy, valid, ids)[learnt]
        return {"loss": divergence(student, self.network.teacher_logits(ids, valid)[learnt], 1.0)}
