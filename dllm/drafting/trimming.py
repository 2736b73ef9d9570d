"""A drafter's head with the frequent rows only: smaller products, exact distributions."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..core.canvas import IntArray
from ..core.errors import ConfigError

TrimLike = Any  # ids, or a JSON file that holds them


class TrimmedHead(nn.Module):
    """Hidden states (..., D) to logits (..., V) that are minus infinity outside ``ids``.

    Only the rows of ``ids`` are multiplied (FR-Spec, arXiv 2502.14856).  Normalised, the result is
    the drafter's distribution, so that every accept rule stays exact.
    """

    def __init__(self, head: Any, ids: IntArray) -> None:
        super().__init__()
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"trim needs a plain linear head, not {type(head).__name__}: leave it out"
            )
        self.out_features = head.out_features
        self.ids = torch.from_numpy(ids).to(head.weight.device)
        self.weight = head.weight.detach()[self.ids].contiguous()
        self.bias = None if head.bias is None else head.bias.detach()[self.ids]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        few = F.linear(hidden, self.weight, self.bias)
        logits = few.new_full((*few.shape[:-1], self.out_features), -torch.inf)
        logits[..., self.ids] = few
        return logits


def frequent_ids(
    texts: Iterable[Sequence[int]], count: int, always: Sequence[int] = ()
) -> IntArray:
    """The ``count`` most frequent ids of ``texts``, ascending, with ``always`` (stop ids) among
    them.  Best counted in what the verifier writes; rare domains lose acceptance, never text."""
    seen: Counter[int] = Counter()
    for text in texts:
        seen.update(int(token) for token in text)
    ranked = sorted(seen, key=lambda token: (-seen[token], token))
    kept = list(dict.fromkeys([*map(int, always), *ranked]))[: max(count, len(always))]
    return np.array(sorted(kept), np.int64)


def kept_ids(trim: TrimLike, vocab_size: int) -> IntArray:
    """``trim`` as ids, checked."""
    if isinstance(trim, str | Path):
        try:
            trim = json.loads(Path(trim).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"trim is a list of ids or a JSON file of one: {error}") from error
    try:
        ids = np.unique(np.asarray(trim, np.int64))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"trim is a list of ids or a JSON file of one: {error}") from error
    if not ids.size or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ConfigError(f"trim keeps ids of the vocabulary of {vocab_size}, at least one")
    return ids
