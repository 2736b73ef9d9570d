"""Top-p, top-k and min-p from the largest logits alone.

The vocabulary was cut in splits and every split listed its largest logits.  What lies at or above
the smallest entry of every list is known completely and in order; a nucleus that ends there can
be drawn from and described exactly without any other logit.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

from ..noise import row_gumbel_at
from .filters import LOWEST
from .result import Options, TokenStatistics

MOST = 1024  # candidates that are looked at
_FLIP = 0x7FFFFFFF
_NOTHING = (0x7F800000 ^ _FLIP) - 2**31 << 32  # below the key of any logit, -inf included


@dataclass(frozen=True, slots=True)
class Candidates:
    """Logits (R, n) float32, descending, ties by ascending id, and their ids (R, n) int64.

    The first ``known`` (R, 1) int64 of them are the largest of the whole vocabulary; ``whole``
    (R, 1) bool says where these are all there is.
    """

    logit: torch.Tensor
    token: torch.Tensor
    known: torch.Tensor
    whole: torch.Tensor

    @classmethod
    def of(cls, keys: torch.Tensor, size: int) -> Self:
        """From the lists (S, R, K) int64 of `tiles.partials`; ``size`` ids in all."""
        border = keys.amin(2).amax(0).unsqueeze(1)
        flat = keys.transpose(0, 1).flatten(1)
        flat = flat.topk(min(MOST, size, flat.shape[1]), dim=1).values
        real = flat >= _NOTHING
        ordered = (flat >> 32).to(torch.int32)
        logit = (ordered ^ ((ordered >> 31) & _FLIP)).view(torch.float32)
        known = (real & (flat >= border)).sum(1, keepdim=True)
        token = (_FLIP - (flat & 0xFFFFFFFF)).masked_fill_(~real, 0)
        return cls(logit.masked_fill(~real, -torch.inf), token, known, known == size)

    def kept(self, share: torch.Tensor, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
        """Which candidates stay (R, n) bool, and for which rows they do not suffice (R, 1) bool.

        ``share`` (R, n) float64: probabilities at the temperature.
        """
        filters, known = options.filters, self.known.clamp(min=1)
        last, missed = self.logit.gather(1, known - 1), torch.zeros_like(self.whole)

        def limit(keep: torch.Tensor) -> torch.Tensor:
            return self.logit.gather(1, keep.clamp(1, filters.top_k) - 1)

        keep, k_first = self.known, filters.k_first or filters.top_p >= 1
        if filters.top_k and k_first:  # the last that is known must lie below the cut
            cut = limit(keep)
            missed = (last >= cut) & ~self.whole
            share = share / share.masked_fill(self.logit < cut, 0).sum(1, keepdim=True)
        if filters.top_p < 1:
            keep = 1 + (share.cumsum(1) <= filters.top_p).sum(1, keepdim=True)
            missed = missed | (keep > self.known) & ~self.whole
            keep = torch.minimum(keep, self.known)
        stays = torch.arange(share.shape[1], device=share.device) < keep
        if filters.top_k:
            stays &= self.logit >= limit(keep)
        if filters.min_p > 0:
            low = filters.bar(self.logit[:, :1])
            stays &= self.logit >= low
            if filters.top_p >= 1 and not filters.top_k:
                missed = (last >= low) & ~self.whole
        return stays, missed


def narrowed(
    result: TokenStatistics, most: torch.Tensor, warm: torch.Tensor, candidates: Candidates,
    options: Options, keys: torch.Tensor | None, select: torch.Tensor | None,
) -> tuple[TokenStatistics, torch.Tensor]:  # fmt: skip
    """Draw below the filters, and describe what they leave if that is asked for.

    ``result`` are the statistics of the clean logits, ``most`` (R,) the log-probability of the
    largest and ``warm`` (R,) the sum of exp((x - best) / T) over all but the largest.  Returns
    statistics and the rows (R,) bool whose candidates do not suffice: theirs are wrong.
    """
    logit, token = candidates.logit, candidates.token
    best = logit[:, :1].clamp(min=LOWEST)
    temperature = options.temperature or 1.0
    distance = (logit - best) / temperature
    weight = distance.double().exp()
    stays, missed = candidates.kept(weight / (1 + warm.double().unsqueeze(1)), options)
    missed = missed | (candidates.known < options.top) & ~candidates.whole
    missed = missed | (logit[:, :1] == -torch.inf)
    at = torch.zeros_like(candidates.known)
    if options.temperature > 0:
        assert keys is not None
        noisy = row_gumbel_at(keys, token).add_(logit / temperature)
        noisy.masked_fill_(~stays, -torch.inf)
        at = noisy.argmax(1, keepdim=True)
    chosen = token.gather(1, at).squeeze(1)
    count = min(options.top, logit.shape[1])
    if not options.tempered:
        clean = logit - best + most.unsqueeze(1)
        result = replace(result, token=chosen, logprob=clean.gather(1, at).squeeze(1))
        if options.top:
            result = replace(result, top_token=token[:, :count], top_logprob=clean[:, :count])
        return result, missed.squeeze(1)
    distance = distance.masked_fill(~stays, -torch.inf)
    others = torch.where(stays, weight, 0.0)[:, 1:]
    rest = others.sum(1, keepdim=True)
    moment = torch.where(others > 0, others * distance[:, 1:], 0.0).sum(1, keepdim=True)
    normaliser = rest.log1p()
    logprob = (distance - normaliser).float()
    p = (distance.double() - normaliser).exp()
    second = p[:, 1:2] if p.shape[1] > 1 else torch.zeros_like(rest)
    numbers = {
        "margin": p[:, :1] - second,
        "entropy": (normaliser - moment / (1 + rest)).clamp(min=0.0),
        "max_logprob": -normaliser,
    }
    columns = {name: x.float().squeeze(1) for name, x in numbers.items() if name in options.needs}
    if options.top:
        # a list that reaches beyond the filters goes on with the lowest ids: not known here
        missed = missed | (stays.sum(1, keepdim=True) < count)
        columns |= {"top_token": token[:, :count], "top_logprob": logprob[:, :count]}
    if select is not None:
        its = torch.where(token == select.unsqueeze(1), logprob, -torch.inf)
        columns["select_logprob"] = its.amax(1)
    result = replace(result, token=chosen, logprob=logprob.gather(1, at).squeeze(1), **columns)
    return result, missed.squeeze(1)
