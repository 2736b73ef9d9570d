"""Top-p, top-k and min-p on full rows, without sorting whole rows where a few candidates decide."""

import math
from typing import NamedTuple

import torch

CANDIDATES = 1024  # the nucleus of a trained model almost always lies within these
SORT_ELEMENTS = 1 << 19  # elements sorted at once when it does not: some 20 MB
LOWEST = torch.finfo(torch.float32).min


class Filters(NamedTuple):
    """What stays of a distribution: ``temperature`` (0: the likeliest token), then ``top_p`` (the
    token that crosses it stays; >= 1 is off), then ``top_k`` (ties with the k-th stay; 0 is off;
    with ``k_first`` before top-p), then ``min_p`` (of the largest probability; 0 is off; arXiv
    2407.01082)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    k_first: bool = False

    @property
    def cut(self) -> bool:
        """Whether any token is taken away."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def scale(self) -> float:
        """What logits are divided by."""
        return self.temperature if self.temperature > 0 else 1.0

    def bar(self, best: torch.Tensor) -> torch.Tensor:
        """The smallest logit that min-p leaves beside ``best``."""
        return best + self.scale * math.log(self.min_p)


PLAIN = Filters()
# Nats that a dropped token lies below the others where classes of tokens are asked for: a format
# takes it where it leaves nothing else.
FAR = 1000.0


def dropped(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Which tokens ``filters`` take away, (R, V) bool, of ``logits`` (R, V) float32 before the
    temperature.  Of tokens with equal logits at the border of ``top_p`` the lowest ids stay."""
    _, top_p, top_k, min_p, k_first = filters
    size, scale = logits.shape[1], filters.scale
    if min_p > 0:
        low = logits < filters.bar(logits.amax(1, keepdim=True).clamp_(min=LOWEST))
        rest = filters._replace(min_p=0.0)
        return low | dropped(logits, rest) if rest.cut else low
    limit = min(size, top_k) if top_k > 0 else size
    if top_p >= 1:
        cut = logits.topk(limit, dim=1).values[:, -1:]
        return logits < cut
    count = min(size, max(CANDIDATES, top_k))
    best = logits.amax(1, keepdim=True).clamp_(min=LOWEST)
    weight, values = (logits - best).div_(scale).exp_(), logits.topk(count, dim=1).values
    if k_first and top_k > 0:
        weight.masked_fill_(logits < values[:, limit - 1 : limit], 0)
    total = weight.sum(1, keepdim=True, dtype=torch.float64)
    cut, keep = _border(values, best, total, scale, top_p, limit)
    if count < size and bool((beyond := keep > count).any()):
        where = beyond.flatten().nonzero().flatten()
        step = max(1, SORT_ELEMENTS // size)
        for first in range(0, len(where), step):
            rows = where[first : first + step]
            values = logits[rows].sort(dim=1, descending=True).values
            cut[rows], keep[rows] = _border(values, best[rows], total[rows], scale, top_p, limit)
    lost, equal = logits < cut, logits == cut
    # the nucleus may hold only some of the tokens that equal its last one: the lowest ids
    quota = keep - (logits > cut).sum(1, keepdim=True)
    crowded = (equal.sum(1, keepdim=True) > quota).flatten()
    if bool(crowded.any()):
        rank = equal[crowded].cumsum(1, dtype=torch.int32)
        lost[crowded] |= equal[crowded] & (rank > quota[crowded])
    return lost


def _border(
    values: torch.Tensor, best: torch.Tensor, total: torch.Tensor, scale: float, top_p: float,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The smallest logit that stays, and how many tokens the nucleus has: both (R, 1).

    ``values`` (R, n) are the largest logits, descending; a nucleus of n + 1 tokens means that it
    may reach beyond them.
    """
    p = (values.double() - best).div_(scale).exp_().div_(total)
    keep = 1 + (p.cumsum(1) <= top_p).sum(1, keepdim=True)
    at = keep.clamp(max=min(limit, values.shape[1])) - 1
    return values.gather(1, at), keep
