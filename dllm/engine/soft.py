"""Soft inputs: vectors that a row feeds with its tokens, or in their place.

They are part of the row's state, one vector per position, never logits over the vocabulary, and
hold while their block is open.  Two kinds:

- A network with self-conditioning combines every position of the open block with the embedding
  that the last step expected there, the sum of all embeddings weighted by their probabilities.
- A sampler (DMax, arXiv 2604.08302) has decided positions fed as a mixture of their likeliest
  tokens and the mask, in place of the embedding of one token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.canvas import IntArray
from ..kernels.transfer import tensor
from ..models import DiffusionModel
from ..samplers.turn import Mixture
from .packing import Packed
from .rows import Job


def soft_inputs(
    jobs: Sequence[Job], packed: Packed, conditioned: bool, model: DiffusionModel
) -> dict[str, Any]:
    """What a network is given of them: `combined` where it is ``conditioned`` on its own
    predictions, else embeddings where a row has something in place of one."""
    if conditioned:
        return combined(jobs, packed)
    for job in jobs:
        if job.row.feed.mixture is not None:
            return {"inputs_embeds": replaced(jobs, packed, model)}
    return {}


def combined(jobs: Sequence[Job], packed: Packed) -> dict[str, Any]:
    """What a network with self-conditioning takes: which packed queries are of an open block, and
    what was expected there, zeros where nothing is known yet."""
    where, parts, known = list[IntArray](), list[torch.Tensor | None](), None
    for job, start in zip(jobs, packed.starts, strict=True):
        compute, soft = job.plan.compute, job.row.soft
        assert job.layout is not None
        first = job.layout.open
        where.append(np.arange(start + first, start + len(compute)))
        if soft is not None and np.array_equal(soft.positions, compute[first:]):
            known = soft.vectors
            parts.append(soft.vectors)
        else:
            parts.append(None)
    vectors = None
    if known is not None:
        vectors = torch.cat([
            known.new_zeros(len(at), known.shape[1]) if part is None else part
            for at, part in zip(where, parts, strict=True)
        ])  # fmt: skip
    return {"open": tensor(np.concatenate(where), packed.ids.device), "soft": vectors}


def replaced(jobs: Sequence[Job], packed: Packed, model: DiffusionModel) -> torch.Tensor:
    """(1, Q, d) embeddings of a forward with the rows' mixtures in place of some."""
    embeddings: torch.Tensor = model.embedding(packed.ids).clone()
    for job, start in zip(jobs, packed.starts, strict=True):
        mixed = job.row.feed.mixture
        if mixed is not None:
            at = start + np.searchsorted(job.plan.compute, mixed.positions)
            vectors = mixture(mixed, model).to(embeddings.dtype)
            embeddings[0, tensor(at, embeddings.device)] = vectors
    return embeddings


def mixture(mixed: Mixture, model: DiffusionModel) -> torch.Tensor:
    """(n, d) float32: weighted embeddings of tokens, and of the mask for the rest, as long as they
    are on average."""
    device = model.device
    mask = torch.full((len(mixed.tokens), 1), model.facts.mask_token_id or 0, device=device)
    ids = torch.cat([tensor(mixed.tokens, device), mask], 1)
    weights = torch.from_numpy(mixed.weights).to(device)
    weights = torch.cat([weights, 1 - weights.sum(1, keepdim=True)], 1)
    each = model.embedding(ids).float()
    mean = (weights[..., None] * each).sum(1)
    length = (weights * each.norm(dim=-1)).sum(1, keepdim=True)
    result: torch.Tensor = mean * (length / (mean.norm(dim=-1, keepdim=True) + 1e-6))
    return result
