"""Learning from what answers are worth: right ones, in few forwards.

LightningRL (arXiv 2603.13319), on policy: a model answers each prompt several times.  Accuracy and
tokens per forward are normalised apart among the answers to a prompt, so that neither drowns the
other; their sum, normalised over the batch, is the advantage of all tokens of an answer.  A token
is judged in the text as it stood when it was decided.  The divergence from the frozen network, and
the likelihood of right answers, keep the model from forgetting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...errors import ConfigError
from ..network import Network


@dataclass(frozen=True)
class RewardSettings:
    """``samples``: answers to a prompt, drawn at ``temperature``; ``speed``: weight of tokens per
    forward beside accuracy; ``kl`` and ``nll``: weights of the divergence and of the likelihood of
    right answers; ``spread``: prompts whose answers differ by less in tokens per forward are left
    out, as are those that no answer gets right.  ``rows``: states that go through the network at
    once; more of them are computed again for their gradients, so that memory does not grow."""

    samples: int = 8
    temperature: float = 1.0
    speed: float = 1.0
    kl: float = 0.01
    nll: float = 0.1
    spread: float = 0.01
    rows: int = 64

    def __post_init__(self) -> None:
        if self.samples < 2 or self.rows < 1 or self.temperature <= 0:
            raise ConfigError(
                "rewards compare answers to one prompt that are drawn: samples is at least 2, "
                "temperature above 0, rows at least 1"
            )
        if min(self.speed, self.kl, self.nll, self.spread) < 0:
            raise ConfigError("speed, kl, nll and spread are not negative")


def normalised(values: torch.Tensor) -> torch.Tensor:
    """``values`` less their mean over the last axis, in standard deviations; 0 where all agree."""
    centred = values - values.mean(-1, keepdim=True)
    spread = centred.square().mean(-1, keepdim=True).sqrt()
    return torch.where(spread > 1e-6, centred / spread.clamp_min(1e-6), 0.0)


def advantages(
    right: torch.Tensor, speed: torch.Tensor, settings: RewardSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantage of each answer (P, A), 0 where its prompt is left out, and which prompts (P,) are
    not.  ``right`` (P, A) bool, ``speed`` (P, A) tokens per forward."""
    kept = right.any(1) & (speed.amax(1) - speed.amin(1) >= settings.spread)
    reward = normalised(right.float()) + settings.speed * normalised(speed)
    result = torch.zeros_like(reward)
    result[kept] = normalised(reward[kept].flatten()).view_as(reward[kept])
    return result, kept


def reward_loss(
    log_p: torch.Tensor, reference: torch.Tensor, which: torch.Tensor, advantage: torch.Tensor,
    right: torch.Tensor, settings: RewardSettings,
) -> torch.Tensor:  # fmt: skip
    """The loss of tokens with log-probabilities ``log_p`` (N,) of the network and ``reference``
    (N,) of the frozen one; token i is of answer ``which[i]``, of n with ``advantage`` and ``right``
    (n,).

    A token gains its answer's advantage times p / p without gradient (one update per draw: there is
    nothing to clip); mean over the tokens of an answer, then over answers.  The divergence is the
    estimate exp(d) - d - 1, d = log reference - log p, and the likelihood that of tokens of right
    answers, each the mean over tokens.
    """
    gained = (log_p - log_p.detach()).exp() * advantage[which]
    counts = torch.bincount(which, minlength=len(advantage))
    sums = torch.zeros_like(advantage).index_add(0, which, gained)
    policy = -(sums / counts.clamp_min(1))[counts > 0].mean()
    apart = reference - log_p
    divergence = (apart.exp() - apart - 1).mean()
    own = right[which]
    likelihood = -(log_p * own).sum() / own.sum().clamp_min(1)
    return policy + settings.kl * divergence + settings.nll * likelihood


def states(
    texts: Sequence[tuple[Sequence[int], int, Sequence[int], int]],
) -> dict[str, torch.Tensor]:
    """Every text as it stood before each of its steps, a row per state: ``ids`` (R, L), ``masked``,
    ``learnt`` (decided by this step) and ``valid`` (R, L) bool, ``text`` (R,) its number.

    A text: ids, where the answer starts, the step that decided each token of it (-1: none did), and
    how many of its tokens are learnt, the others being behind its end.
    """
    length = max(len(ids) for ids, *_ in texts)
    rows: dict[str, list[Any]] = {name: [] for name in ("ids", "masked", "learnt", "valid", "text")}
    for number, (ids, start, order, count) in enumerate(texts):
        padding = length - len(ids)
        for step in sorted({s for s in order[:count] if s >= 0}):
            masked = [s < 0 or s >= step for s in order]
            learnt = [s == step and place < count for place, s in enumerate(order)]
            rows["ids"].append([*ids, *[0] * padding])
            rows["masked"].append([False] * start + masked + [False] * padding)
            rows["learnt"].append([False] * start + learnt + [False] * padding)
            rows["valid"].append([True] * len(ids) + [False] * padding)
            rows["text"].append(number)
    return {name: torch.tensor(values) for name, values in rows.items()}


class Reward(nn.Module):
    """The objective of a batch of answers that the network has drawn."""

    def __init__(self, network: Network, settings: RewardSettings) -> None:
        super().__init__()
        self.network, self.settings = network, settings

    def forward(
        self, ids: torch.Tensor, masked: torch.Tensor, learnt: torch.Tensor, valid: torch.Tensor,
        text: torch.Tensor, advantage: torch.Tensor, right: torch.Tensor,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """``loss`` of `states`, whose texts have ``advantage`` and ``right`` (n,)."""
        own, reference = [], []
        for first in range(0, len(ids), self.settings.rows):
            here = slice(first, first + self.settings.rows)
            chunk = ids[here], masked[here], learnt[here], valid[here]
            if len(ids) > self.settings.rows:
                own.append(checkpoint(self._log_p, *chunk, use_reentrant=False))
            else:
                own.append(self._log_p(*chunk))
            reference.append(self._log_p(*chunk, frozen=True))
        which = text[:, None].expand_as(ids)[learnt]
        loss = reward_loss(torch.cat(own), torch.cat(reference), which, advantage, right,
                           self.settings)  # fmt: skip
        return {"loss": loss}

    def _log_p(
        self, ids: torch.Tensor, masked: torch.Tensor, learnt: torch.Tensor, valid: torch.Tensor,
        frozen: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Log-probabilities of the learnt tokens as they are drawn: at the temperature, and never
        the mask."""
        noisy = torch.where(masked, self.network.mask_id, ids)
        logits = self.network.teacher_logits if frozen else self.network.logits
        rows = logits(noisy, valid, ids)[learnt] / self.settings.temperature
        rows = rows.index_fill(1, torch.tensor(self.network.mask_id, device=rows.device), -1e9)
        return rows.log_softmax(-1).gather(1, ids[learnt][:, None])[:, 0]
