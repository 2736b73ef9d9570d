"""Token statistics of a head that is split over processes: each owns a share of the vocabulary.

Every process reduces its share to a few numbers per row; one collective carries them to all, and
all merge them in the same order, so that every process has the same statistics, to the last bit,
and no process ever sees the logits of another.  Only where top-p or top-k leave more tokens than
the shares list are the logits of those rows gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from types import ModuleType

import torch
import torch.distributed as dist

from . import torch as plain
from .candidates import Candidates, narrowed
from .filters import Filters
from .heads import Share
from .reduce import FIELDS, Partial, finish, merge
from .result import OPTIONAL, Gather, Inputs, Options, TokenStatistics, mended, pack, unpack

LISTED = 256  # candidates for top-p and top-k


def token_statistics(
    hidden: torch.Tensor,
    share: Share,
    options: Options,
    backend: ModuleType,
    inputs: Inputs,
) -> TokenStatistics:
    """As `dllm.kernels.statistics.token_statistics`, called by every process of the group alike.

    ``hidden`` (R, d) and all arguments, in ids of the whole vocabulary, are the same everywhere.
    ``backend``, `plain` or the Triton version, reduces the share.
    """
    share = share.cut(inputs.vocab_size)

    def again(x: torch.Tensor, some: Inputs) -> TokenStatistics:
        return plain.token_statistics(x, share, options, some)

    if min(share.sizes) < max(1, options.top) or not len(hidden):
        return again(hidden, inputs)  # a share is shorter than the list: go by the logits
    fused = backend is not plain and options.top <= backend.MOST_TOP and not options.classes
    split = backend.split_statistics if fused else split_statistics
    result, missed = split(hidden, share, options, partial(_gather, share), inputs)
    return mended(result, missed, hidden, inputs, again)


def split_statistics(
    hidden: torch.Tensor,
    share: Share,
    options: Options,
    gather: Gather,
    inputs: Inputs,
) -> tuple[TokenStatistics, torch.Tensor | None]:
    """Statistics, and with top-p or top-k the rows (R,) bool they are wrong for.

    ``gather`` takes the tensors of this process and returns those of all, in the order of shares.
    """
    listed = min(LISTED, *share.sizes) if options.filtered else 0
    mine = share_partial(hidden, share, options, listed, inputs)
    present = {f.name: x for f in FIELDS if (x := getattr(mine, f.name)) is not None}
    parts = [
        Partial(**dict(zip(present, part, strict=True))) for part in gather([*present.values()])
    ]
    return merge_shares(parts, options, listed, share.out_features, inputs)


def share_partial(
    hidden: torch.Tensor,
    share: Share,
    options: Options,
    listed: int,
    inputs: Inputs,
) -> Partial:
    """What one share says; ``listed`` candidates where there are filters."""
    call = plain.Call(_open(options, listed), inputs, share.first_id)
    return plain.linear_partial(call, hidden, share.weight, share.bias)


def merge_shares(
    parts: Sequence[Partial], options: Options, listed: int, size: int, inputs: Inputs
) -> tuple[TokenStatistics, torch.Tensor | None]:
    """`split_statistics` from the partial results of all shares of a vocabulary of ``size``."""
    opened = _open(options, listed)
    total = reduce(lambda a, b: merge(a, b, opened), parts)
    result = finish(total, opened)
    if not options.filtered:
        return result, None
    assert total.top_value is not None and total.top_index is not None and total.warm is not None
    known = torch.full_like(total.top_index[:, :1], total.top_value.shape[1])
    candidates = Candidates(total.top_value, total.top_index, known, known >= size)
    most: torch.Tensor = result.max_logprob  # type: ignore[assignment]  # asked for by _open
    kept = {n: getattr(result, n) if n in options.needs else None for n in OPTIONAL}
    result = replace(result, top_token=None, top_logprob=None, **kept)
    return narrowed(
        result, most, total.warm.squeeze(1), candidates, options, inputs.noise_keys, inputs.select
    )


def _open(options: Options, listed: int) -> Options:
    """Options of the pass over a share: filters need the whole, the pass lists candidates."""
    if not options.filtered:
        return options
    return Options(
        Filters(options.temperature or 1.0), top=max(options.top, listed), warm=True,
        needs=OPTIONAL,
    )  # fmt: skip


def _gather(share: Share, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors of all processes, by rank, in one collective."""
    packed = pack(tensors)
    received = [torch.empty_like(packed) for _ in share.sizes]
    dist.all_gather(received, packed, group=share.group)
    shapes = [(x.shape, x.dtype) for x in tensors]
    return [unpack(part, shapes) for part in received]
