"""Token statistics of a head that is split over processes: each owns a share of the vocabulary.

Every process reduces its share to the sums of `reduce.Partial`, a few numbers per row; one
collective carries them to all, and all merge them in the same order, so that every process has
the same statistics, to the last bit, and no process ever sees the logits of another.  Only where
top-p or top-k leave more than `LISTED` tokens are the logits of those rows gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from . import torch as plain
from .candidates import Candidates, narrowed
from .reduce import FIELDS, Partial, finish, merge
from .result import OPTIONAL, Options, TokenStatistics, check, pack, put, unpack

LISTED = 256  # candidates for top-p and top-k


@torch.no_grad()
def shard_partial(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    options: Options,
    *,
    first_id: int,
    bias: torch.Tensor | None = None,
    banned: Sequence[int] | torch.Tensor | None = None,
    banned_rows: torch.Tensor | None = None,
    noise_keys: torch.Tensor | None = None,
    select: torch.Tensor | None = None,
    listed: int = 0,
) -> Partial:
    """What one share ``weight`` (n, d) of the head says, its first row being id ``first_id``.

    ``banned``, ``select`` and noise are in ids of the whole vocabulary.
    """
    call = plain.Call(
        _open(options, listed), banned, banned_rows, noise_keys, select, first_id=first_id
    )
    return plain.linear_partial(call, hidden, weight, bias)


@torch.no_grad()
def merge_shards(
    parts: Sequence[Partial],
    options: Options,
    size: int,
    noise_keys: torch.Tensor | None = None,
    select: torch.Tensor | None = None,
    listed: int = 0,
) -> tuple[TokenStatistics, torch.Tensor | None]:
    """Statistics from all shares, ascending, of a vocabulary of ``size``; and with top-p or top-k
    the rows (R,) bool whose ``listed`` candidates do not suffice."""
    opened = _open(options, listed)
    total = reduce(lambda a, b: merge(a, b, opened), parts)
    found = finish(total, opened)
    if not options.filters:
        return found, None
    assert total.top_value is not None and total.top_index is not None and total.warm is not None
    known = torch.full_like(total.top_index[:, :1], total.top_value.shape[1])
    candidates = Candidates(total.top_value, total.top_index, known, known >= size)
    most: torch.Tensor = found.max_logprob  # type: ignore[assignment]  # asked for by _open
    kept = {n: getattr(found, n) if n in options.needs else None for n in OPTIONAL}
    found = replace(found, top_token=None, top_logprob=None, **kept)
    return narrowed(found, most, total.warm.squeeze(1), candidates, options, noise_keys, select)


def _open(options: Options, listed: int) -> Options:
    """Options of the pass over a share: filters need the whole, the pass lists candidates."""
    if not options.filters:
        return options
    return Options(
        temperature=options.temperature or 1.0, top=max(options.top, listed), warm=True,
        needs=OPTIONAL,
    )  # fmt: skip


@torch.no_grad()
def parallel_statistics(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    first_id: int,
    size: int,
    group: dist.ProcessGroup | None = None,
    bias: torch.Tensor | None = None,
    banned: Sequence[int] | torch.Tensor | None = None,
    banned_rows: torch.Tensor | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    tempered: bool = False,
    noise_keys: torch.Tensor | None = None,
    top: int = 0,
    select: torch.Tensor | None = None,
    needs: Sequence[str] | frozenset[str] | None = None,
) -> TokenStatistics:
    """As `token_statistics`, called by every process of ``group`` (default: all) alike.

    ``hidden`` (R, d) is the same everywhere; ``weight`` (n, d) is the share of this process,
    ids ``first_id`` to ``first_id + n`` of ``size``; shares ascend with the rank.  The other
    arguments, in ids of the whole vocabulary, are the same everywhere.
    """
    options = Options(
        temperature, top_p, top_k, tempered, top,
        OPTIONAL if needs is None else frozenset(needs),
    )  # fmt: skip
    check(options, noise_keys, len(hidden))
    rows: dict[str, Any] = {"banned_rows": banned_rows, "noise_keys": noise_keys, "select": select}
    shares = _gather_sizes(len(weight), hidden.device, group)
    listed = min(LISTED, min(shares)) if options.filters else 0
    opened = _open(options, listed)
    if options.top > min(shares):
        parts = None  # a share is shorter than the list: go by the logits
    else:
        mine = shard_partial(
            hidden, weight, options, first_id=first_id, bias=bias, banned=banned, listed=listed,
            **rows,
        )  # fmt: skip
        parts = _gather(mine, opened, group)
    if parts is None:
        return _by_logits(hidden, weight, bias, shares, options, banned, rows, group)
    found, missed = merge_shards(parts, options, size, noise_keys, select, listed)
    if missed is None or not bool(missed.any()):
        return found
    which = missed.nonzero().flatten()
    some = {name: None if x is None else x[which] for name, x in rows.items()}
    again = _by_logits(hidden[which], weight, bias, shares, options, banned, some, group)
    return put(found, which, again)


def _by_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shares: list[int],
    options: Options, banned: Sequence[int] | torch.Tensor | None, rows: dict[str, Any],
    group: dist.ProcessGroup | None,
) -> TokenStatistics:  # fmt: skip
    """Statistics of gathered logits."""
    own = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias).float()
    own = torch.nn.functional.pad(own, (0, max(shares) - len(weight)))
    logits = [torch.empty_like(own) for _ in shares]
    dist.all_gather(logits, own.contiguous(), group=group)
    whole = torch.cat([part[:, :n] for part, n in zip(logits, shares, strict=True)], 1)
    return plain.logits_statistics(whole, options, banned=banned, **rows)


def _gather_sizes(own: int, device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(_count(group))]
    dist.all_gather(sizes, torch.tensor([own], device=device), group=group)
    return [int(n) for n in torch.cat(sizes).tolist()]


def _gather(mine: Partial, options: Options, group: dist.ProcessGroup | None) -> list[Partial]:
    """The partial results of all processes, by rank, in one collective."""
    present = {f.name: x for f in FIELDS if (x := getattr(mine, f.name)) is not None}
    packed = pack(present.values())
    received = [torch.empty_like(packed) for _ in range(_count(group))]
    dist.all_gather(received, packed, group=group)
    shapes = [(x.shape, x.dtype) for x in present.values()]
    return [Partial(**dict(zip(present, unpack(p, shapes), strict=True))) for p in received]


def _count(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group)
