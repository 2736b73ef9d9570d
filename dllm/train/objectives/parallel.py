"""Learning to decide more at once, from one's own trajectories.

A state is a text with the masks it had at some moment of its decoding.  On it the student learns
what the teacher took several steps for.  Three published recipes are settings of `Parallel`:

- TAD (arXiv 2605.09536), the general form: any moment of the trajectory; cross-entropy on what was
  decided within the next ``delta`` steps, and on what stayed masked the divergence from the frozen
  network, whose prompt holds a reference answer.
- dParallel (arXiv 2509.26488): a random half of one block, then the other half; cross-entropy on
  all of it, and where the student is right its entropy, so that it also becomes sure.
- d3LLM (arXiv 2601.07568): one block at the moment when a share of it was masked that grows over
  the run; cross-entropy, and entropy as above.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ..network import Network

STATES = ("trajectory", "random", "order")
NEVER = 1 << 15  # order of a token that was never decided: masked in all states, not learnt


@dataclass(frozen=True)
class ParallelSettings:
    """``state``: where masks stand: "trajectory" (a moment of the whole text), "random" (half of a
    block of ``block`` tokens, everything behind it masked), "order" (the part of a block that was
    decided last).  ``delta``: steps within which a token must have been decided to be learnt by
    cross-entropy; 0: all.  ``kl``: weight of the divergence on the others, with ``tau`` their
    temperature; ``reference``: whether the teacher sees the answer.  ``entropy``: weight of the
    entropy, at temperature ``entropy_tau``; ``complement``: learn the other half, too, by entropy
    only in state "random".  ``ratio``: share of the block that is masked, from the first to the
    second over the run.  ``scale`` multiplies the sum."""

    state: str = "trajectory"
    delta: int = 8
    ce: float = 1.0
    kl: float = 1.0
    tau: float = 1.0
    reference: bool = True
    entropy: float = 0.0
    entropy_tau: float = 0.5
    complement: bool = False
    block: int = 32
    ratio: tuple[float, float] = (0.5, 0.5)
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ConfigError(f"state is one of {', '.join(STATES)}, not {self.state!r}")
        if self.delta < 0 or self.block < 1 or self.tau <= 0 or self.entropy_tau <= 0:
            raise ConfigError("delta must not be negative; block and temperatures are positive")
        if not 0 <= self.ratio[0] <= self.ratio[1] <= 1:
            raise ConfigError(f"ratio is a share and one that is not smaller, not {self.ratio}")
        if self.state == "trajectory" and self.ratio != (0.5, 0.5):
            raise ConfigError("a trajectory says what is masked: ratio is of 'random' and 'order'")


PRESETS = {
    "tad": ParallelSettings(),
    "dparallel": ParallelSettings("random", 0, kl=0.0, reference=False, entropy=2.0,
                                  complement=True),
    "d3llm": ParallelSettings("order", 0, kl=0.0, reference=False, entropy=1.0, ratio=(0.0, 0.8),
                              scale=0.25),
}  # fmt: skip


def trajectory_state(
    order: torch.Tensor, step: torch.Tensor, delta: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is masked after ``step`` (B,) steps, and what of it is decided within ``delta`` more (0:
    all of it): (B, L) bool each.  ``order`` (B, L) is the step, from 0, that decided a token, -1
    for what was given."""
    masked = order >= step[:, None]
    soon = masked & (order < step[:, None] + delta) if delta else masked
    return masked, soon


def block_state(
    places: torch.Tensor, first: torch.Tensor, size: int, inside: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks ``inside`` (B, L) the block of ``size`` answer tokens from the ``first`` (B,) on, and
    everywhere behind it; and those of the block.  ``places`` (B, L): number of each answer token
    from 0, -1 elsewhere."""
    block = (places >= first[:, None]) & (places < first[:, None] + size)
    return (block & inside) | (places >= first[:, None] + size), block & inside


def last_decided(order: torch.Tensor, block: torch.Tensor, ratio: float) -> torch.Tensor:
    """(B, L) bool: what was masked in ``block`` (B, L) when for the last time at least ``ratio`` of
    it was."""
    result = torch.zeros_like(block)
    for row, (steps, here) in enumerate(zip(order, block, strict=True)):
        own = steps[here].sort(descending=True).values
        if len(own):
            count = min(len(own), max(1, -int(-ratio * len(own) // 1)))
            result[row] = here & (steps >= own[count - 1])
    return result


def certainty(
    logits: torch.Tensor, labels: torch.Tensor, tau: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of rows (n, V), and mean entropy at temperature ``tau`` of those whose
    largest logit is the label's; 0 where there are none."""
    if not len(labels):
        return logits.sum() * 0.0, logits.sum() * 0.0
    log_p = (logits[logits.argmax(-1) == labels] / tau).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return F.cross_entropy(logits, labels), entropy.sum() / max(1, len(entropy))


def divergence(student: torch.Tensor, teacher: torch.Tensor, tau: float) -> torch.Tensor:
    """Mean over rows (n, V) of KL(teacher || student) at temperature ``tau``, times its square."""
    if not len(student):
        return student.sum() * 0.0
    log_q, log_p = (student / tau).log_softmax(-1), (teacher / tau).log_softmax(-1)
    return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean") * tau**2


class Parallel(nn.Module):
    """The objective.  A batch holds ``ids`` (B, L), ``order`` (B, L) (the step that decided each
    token, -1: given), ``valid`` (B, L) bool, ``progress`` of the run in [0, 1], ``seed``, and, for
    a teacher with references, ``hint`` (B, H) int64, ids that stand before its text, padded with -1
    on the left."""

    def __init__(self, network: Network, settings: ParallelSettings) -> None:
        super().__init__()
        self.network, self.settings = network, settings

    def forward(
        self, ids: torch.Tensor, order: torch.Tensor, valid: torch.Tensor, progress: torch.Tensor,
        seed: torch.Tensor, hint: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """``loss`` of a batch."""
        generator = torch.Generator().manual_seed(int(seed))
        masked, learnt = self._state(order, float(progress), generator)
        settings = self.settings
        total = self._view(ids, order, masked, learnt, valid, hint, settings.entropy)
        if settings.complement:
            other = self._block & ~learnt
            rest = (masked & ~learnt) | other
            entropy = settings.entropy if settings.state == "random" else 0.0  # as each publishes
            total = total + self._view(ids, order, rest, other, valid, None, entropy)
        return {"loss": settings.scale * total}

    def _state(
        self, order: torch.Tensor, progress: float, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What is masked, and what of it is learnt by cross-entropy."""
        settings, (rows, _) = self.settings, order.shape
        draw = torch.rand(rows, generator=generator).to(order.device)
        if settings.state == "trajectory":
            steps = torch.where(order < NEVER, order, -1).max(1).values + 1
            masked, soon = trajectory_state(order, (draw * steps).long(), settings.delta)
            return masked, soon & (order < NEVER)
        answer = (order >= 0) & (order < NEVER)
        places = torch.where(answer, answer.cumsum(1) - 1, -1)
        blocks = -(-answer.sum(1) // settings.block)
        first = (draw * blocks).long() * settings.block
        _, self._block = block_state(places, first, settings.block, torch.ones_like(answer))
        low, high = settings.ratio
        ratio = low + (high - low) * progress
        if settings.state == "random":
            inside = torch.rand(order.shape, generator=generator).to(order.device) < ratio
        else:  # between what the run has reached and its end
            drawn = float(torch.rand((), generator=generator))
            inside = last_decided(order, self._block, ratio + (high - ratio) * drawn)
        masked, learnt = block_state(places, first, settings.block, inside)
        return masked | (order == NEVER), learnt

    def _view(
        self, ids: torch.Tensor, order: torch.Tensor, masked: torch.Tensor, learnt: torch.Tensor,
        valid: torch.Tensor, hint: torch.Tensor | None, weight: float,
    ) -> torch.Tensor:  # fmt: skip
        """The loss of one state; ``weight``: of the entropy."""
        settings, net = self.settings, self.network
        noisy = torch.where(masked, net.mask_id, ids)
        logits = net.logits(noisy, valid, ids)
        ce, entropy = certainty(logits[learnt], ids[learnt], settings.entropy_tau)
        total = settings.ce * ce + weight * entropy
        later = masked & ~learnt & (order < NEVER)
        if settings.kl and later.any():
            if hint is not None:  # what only the teacher sees
                noisy = torch.cat([hint.clamp_min(0), noisy], 1)
                valid = torch.cat([hint >= 0, valid], 1)
            rows = net.teacher_logits(noisy, valid)[:, -ids.shape[1] :][later]
            total = total + settings.kl * divergence(logits[later], rows, settings.tau)
        return total
