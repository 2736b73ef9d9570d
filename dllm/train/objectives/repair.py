"""Learning to correct what was decided.

A model that only ever sees right tokens copies them.  Here part of a text is hidden, and some of
what is hidden shows a wrong token instead of a mask; every position is to become the right one.

- DMax (arXiv 2604.08302), on-policy uniform training: masks are replaced by the model's own best
  guesses from a first forward.
- LLaDA2.1 (arXiv 2602.08676), the token-to-token stream: they are replaced by random tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import ConfigError
from ..network import Network
from .parallel import NEVER, block_state


@dataclass(frozen=True)
class RepairSettings:
    """``noise``: between which shares of the text are hidden; ``on_policy`` and ``random``: shares
    of the batches that show the model's own guesses and random tokens in the place of masks, the
    rest shows masks.  ``block``: of models that see everything one block of so many tokens is
    hidden, what follows it is all masks; models with blocks of their own learn all at once."""

    noise: tuple[float, float] = (0.75, 0.75)
    on_policy: float = 0.5
    random: float = 0.0
    block: int = 32

    def __post_init__(self) -> None:
        if not 0 <= self.noise[0] <= self.noise[1] <= 1:
            raise ConfigError(f"noise is two rising shares of the text, not {self.noise}")
        if self.on_policy < 0 or self.random < 0 or self.on_policy + self.random > 1:
            raise ConfigError("on_policy and random are shares of the batches: at most 1 together")


PRESETS = {
    "dmax": RepairSettings(),
    "llada2.1": RepairSettings((0.0, 1.0), on_policy=0.0, random=0.5),
    "both": RepairSettings((0.3, 1.0), on_policy=0.4, random=0.3),
}


def repair_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of ``logits`` (B, L, V) where ``labels`` (B, L) are not -100."""
    return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)


class Repair(nn.Module):
    """The objective; batches as those of `parallel.Parallel`."""

    def __init__(self, network: Network, settings: RepairSettings) -> None:
        super().__init__()
        self.network, self.settings = network, settings

    def forward(
        self, ids: torch.Tensor, order: torch.Tensor, valid: torch.Tensor, progress: torch.Tensor,
        seed: torch.Tensor,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """``loss`` of a batch."""
        generator = torch.Generator().manual_seed(int(seed))
        hidden, learnt, shown = self._state(order, generator)
        kind = float(torch.rand((), generator=generator))
        noisy = torch.where(hidden, self.network.mask_id, ids)
        if kind < self.settings.on_policy:
            noisy = self.guessed(noisy, shown, valid, ids)
        elif kind < self.settings.on_policy + self.settings.random:
            size = self.network.facts.vocab_size
            tokens = torch.randint(size, ids.shape, generator=generator).to(ids.device)
            noisy = torch.where(shown, tokens, noisy)
        logits = self.network.logits(noisy, valid, ids)
        return {"loss": repair_loss(logits, torch.where(learnt, ids, -100))}

    @torch.no_grad()
    def guessed(
        self, noisy: torch.Tensor, shown: torch.Tensor, valid: torch.Tensor | None,
        clean: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """``noisy`` (B, L) with the model's best guesses at its masks where ``shown``."""
        guesses = self.network.logits(noisy, valid, clean).argmax(-1)
        return torch.where((noisy == self.network.mask_id) & shown, guesses, noisy)

    def _state(
        self, order: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What is hidden, what is learnt, and what may show a wrong token."""
        low, high = self.settings.noise
        draws = torch.rand(2, len(order), 1, generator=generator).to(order.device)
        noise = torch.rand(order.shape, generator=generator).to(order.device)
        inside, never = noise < low + (high - low) * draws[0], order == NEVER
        answer = (order >= 0) & ~never
        if self.network.facts.block_length:
            return (answer & inside) | never, answer, answer & inside
        places = torch.where(answer, answer.cumsum(1) - 1, -1)
        blocks = -(-answer.sum(1) // self.settings.block)
        first = (draws[1, :, 0] * blocks).long() * self.settings.block
        size, everywhere = self.settings.block, torch.ones_like(answer)
        hidden, here = block_state(places, first, size, inside)
        return hidden | never, block_state(places, first, size, everywhere)[1], here
