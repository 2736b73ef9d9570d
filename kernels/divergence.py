"""How far a distribution has moved since the last step: full log-probabilities are kept for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .statistics.heads import Head, full_logits


def log_probabilities(hidden: torch.Tensor, head: Head, banned: Sequence[int] = ()) -> torch.Tensor:
    """(n, V) float32 log-probabilities of hidden rows (n, d) under ``head``, without ``banned``
    ids.  This materialises n x V numbers: only for samplers that compare whole distributions."""
    logits = full_logits(hidden, head).float()
    if banned:  # not in place: a head that is called may own what it returned
        logits = logits.index_fill(1, torch.tensor(banned, device=logits.device), -torch.inf)
    return logits.log_softmax(-1)


def divergence(
    positions: npt.NDArray[np.int64],
    logprobs: torch.Tensor,
    previous: tuple[npt.NDArray[np.int64], torch.Tensor] | None,
) -> torch.Tensor:
    """Kullback-Leibler divergence KL(now || before) in nats: (n,) float32 on the device of
    ``logprobs``.

    ``logprobs`` (n, V) at ``positions``; ``previous``: the same of the step before.  Infinite
    where there is nothing to compare with.
    """
    result = logprobs.new_full((len(positions),), torch.inf)
    if previous is not None and len(positions):
        known, before = previous
        both, here, there = np.intersect1d(positions, known, return_indices=True)
        if both.size:
            at = torch.from_numpy(here).to(logprobs.device)
            now = logprobs[at]
            then = before[torch.from_numpy(there).to(before.device)]
            result[at] = torch.where(now > -torch.inf, now.exp() * (now - then), 0.0).sum(-1)
    return result
