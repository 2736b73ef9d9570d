"""What has changed since the last step: full log-probabilities are kept for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .noise import row_gumbel
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


def residual(
    positions: npt.NDArray[np.int64], logprobs: torch.Tensor,
    previous: tuple[npt.NDArray[np.int64], torch.Tensor] | None, keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A token for each of the ``positions`` from what the distribution has gained, (q - p)+
    normalised, and its log-probability in q: (n,) int64, (n,) float32.

    ``logprobs`` (n, V) are those of q, ``previous`` those of p, which must have all positions;
    ``keys`` (n, 4) name the noise.  Where nothing is gained the token comes from q.
    """
    assert previous is not None, "the step before has predicted these positions"
    at = torch.from_numpy(np.searchsorted(previous[0], positions)).to(logprobs.device)
    now = logprobs.exp()
    gained = (now - previous[1][at].exp()).clamp_min_(0)
    weight = torch.where(gained.sum(-1, keepdim=True) > 0, gained, now)
    token = (weight.log() + row_gumbel(keys, 0, weight.shape[-1])).argmax(-1)
    return token, logprobs.gather(1, token[:, None])[:, 0]
