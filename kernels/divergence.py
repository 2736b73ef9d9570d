"""Whole distributions of two steps: full log-probabilities are kept for it."""

from collections.abc import Sequence

import torch

from .noise import row_gumbel
from .statistics.filters import Filters, dropped
from .statistics.heads import Head, full_logits
from .statistics.result import COLDEST


def log_probabilities(
    hidden: torch.Tensor, head: Head, banned: Sequence[int] = (),
    banned_rows: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """(n, V) float32 log-probabilities of hidden rows (n, d) under ``head``, without ``banned``
    ids, or those of them that ``banned_rows`` (n, len(banned)) names for each row.  This
    materialises n x V numbers: only for samplers that compare whole distributions."""
    logits = full_logits(hidden, head).float()
    if banned:  # not in place: a head that is called may own what it returned
        ids = torch.tensor(banned, device=logits.device)
        rest = logits[:, ids]
        lost = torch.ones_like(rest, dtype=torch.bool) if banned_rows is None else banned_rows
        logits = logits.index_copy(1, ids, rest.masked_fill(lost, -torch.inf))
    return logits.log_softmax(-1)


def drawn_from(logprobs: torch.Tensor, filters: Filters) -> torch.Tensor:
    """(n, V) log-probabilities after temperature and filters; unchanged at temperature 0."""
    if filters.temperature < COLDEST:
        return logprobs
    if filters.cut:
        logprobs = logprobs.masked_fill(dropped(logprobs, filters), -torch.inf)
    return (logprobs / filters.temperature).log_softmax(-1)


def residual(q: torch.Tensor, p: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A token for each row of log-probabilities ``q`` (n, V) from what it has gained over ``p``,
    (q - p)+ normalised, or from q where that is 0: (n,) int64.  ``keys`` (n, 4) name the noise."""
    now = q.exp()
    gained = (now - p.exp()).clamp_min_(0)
    weight = torch.where(gained.sum(-1, keepdim=True) > 0, gained, now)
    return (weight.log() + row_gumbel(keys, 0, weight.shape[-1])).argmax(-1)
