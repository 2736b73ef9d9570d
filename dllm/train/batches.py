"""Examples of a file, and the batch of a step: a function of seed and step alone."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ..core.errors import ConfigError, short
from ..core.json_lines import read_json_lines

Example = TypeVar("Example")
POOL = 32  # batches that are drawn and sorted by length together


def examples(path: Path, what: str, form: str, make: Callable[[Any], Example]) -> Iterator[Example]:
    """What ``make`` makes of every line of a file of ``what``, as JSON lines.  Raises `ConfigError`
    for a file without any, and for a line that is not of the ``form``."""
    for where, entry in read_json_lines(path, what):
        try:
            yield make(entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            line = where.removesuffix(f" of {path}")
            raise ConfigError(
                f"{path}, {line}: expected {form}, not {short(entry)} ({error!s:.80})"
            ) from error


def answer_ids(
    entry: Any, vocabulary: int | None = None, context: int | None = None
) -> tuple[tuple[int, ...], int]:
    """``ids`` of prompt and answer, and where the ``answer`` starts.  Raises `ValueError` where
    these are no ids (of a vocabulary and a context of that size), or no answer."""
    ids, start = tuple(entry["ids"]), entry["answer"]
    most = math.inf if vocabulary is None else vocabulary
    if not 0 < len(ids) <= (context or math.inf):
        raise ValueError(f"{len(ids)} ids for a context of {context}")
    for token in ids:
        if type(token) is not int or not 0 <= token < most:
            raise ValueError(f"{token!r} is no id of {most} tokens")
    if type(start) is not int or not 0 <= start <= len(ids):
        raise ValueError(f"an answer from {start!r} on, of {len(ids)} tokens")
    return ids, start


class AnswerBatches(Dataset[dict[str, torch.Tensor]]):
    """Batch ``i`` of a run of ``count`` batches of ``rows`` answers of similar length: a function
    of seed and ``i``, so that a run can be taken up again."""

    def __init__(self, answers: Sequence[Any], rows: int, count: int, seed: int) -> None:
        if len(answers) < rows:
            raise ConfigError(
                f"{len(answers)} answers are too few for batches of {rows}: give more prompts, or "
                "fewer --rows"
            )
        self.answers, self.rows, self.count, self.seed = answers, rows, count, seed
        self.lengths = tuple(len(answer.ids) for answer in answers)

    def __len__(self) -> int:
        return self.count

    def chosen(self, index: int) -> tuple[list[Any], random.Random]:
        """The answers of a batch, and its random numbers."""
        epoch, place = divmod(index, len(self.answers) // self.rows)
        at = _epoch(self.lengths, self.rows, self.seed, epoch)[place]
        return [self.answers[i] for i in at], random.Random(f"{self.seed}/{index}")


def padded(rows: Iterable[Any], value: float = 0, side: str = "right") -> torch.Tensor:
    """Rows (n, ...) of different lengths as one tensor (B, longest, ...), with ``value`` beyond."""
    return pad_sequence([torch.as_tensor(row) for row in rows], True, value, side)


@lru_cache(maxsize=4)
def _epoch(lengths: tuple[int, ...], rows: int, seed: int, epoch: int) -> list[list[int]]:
    """Numbers of the ``rows`` examples of each batch, of similar ``lengths``: drawn in pools
    without replacement, sorted by length and cut, so that little is spent on padding."""
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
