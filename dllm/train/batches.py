"""Which examples make up the batch of a step: a function of seed and step, nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

POOL = 32  # batches that are drawn and sorted by length together


def arranged(lengths: Sequence[int], rows: int, seed: int, step: int) -> list[int]:
    """Numbers of the ``rows`` examples of a step, of similar ``lengths``.

    Examples are drawn in pools without replacement, sorted by length and cut into batches, so that
    little is spent on padding.  ``lengths`` must not change during a run.
    """
    epoch, place = divmod(step, max(1, len(lengths) // rows))
    return _epoch(tuple(lengths), rows, seed, epoch)[place]


@lru_cache(maxsize=4)
def _epoch(lengths: tuple[int, ...], rows: int, seed: int, epoch: int) -> list[list[int]]:
    rng = random.Random(f"{seed}/{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    batches: list[list[int]] = []
    size = POOL * rows
    for first in range(0, len(order), size):
        pool = sorted(order[first : first + size], key=lambda i: lengths[i])
        here = [pool[i : i + rows] for i in range(0, len(pool), rows)]
        rng.shuffle(here)
        batches += [batch for batch in here if len(batch) == rows]
    return batches
