"""Batches of generated tasks as token ids.

A row is ``prompt | answer | end tokens``.  Rows of similar length share a batch, so that little is
spent on end tokens; step ``i`` of a recipe always sees the same batch, which makes runs resumable.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from ..eval.tasks import TASKS, Example

CANVAS = 64  # the canvas the bundled models are used with by default
POOL = 8  # batches drawn together and sorted by length


@dataclass(frozen=True)
class Batch:
    """``ids`` (B, L) int64; ``answer`` (B, L) bool marks what the model has to write;
    ``tail`` (B, L) bool marks end tokens after the first."""

    ids: torch.Tensor
    answer: torch.Tensor
    tail: torch.Tensor

    def to(self, device: str) -> Batch:
        """The same on a device."""
        return Batch(self.ids.to(device), self.answer.to(device), self.tail.to(device))


class TaskStream:
    """Step number -> `Batch` of about ``tokens`` token positions.

    ``weights`` maps a step to how often each task is drawn then.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        weights: Callable[[int], Mapping[str, float]],
        tokens: int,
        seed: int,
    ) -> None:
        self.tokenizer, self.weights, self.tokens, self.seed = tokenizer, weights, tokens, seed
        self._pool: list[list[tuple[list[int], list[int], int]]] = []
        self._pool_index = -1

    def __getitem__(self, step: int) -> Batch:
        index, offset = divmod(step, POOL)
        if index != self._pool_index:
            self._pool, self._pool_index = self._draw_pool(index), index
        return self._collate(self._pool[offset])

    def _draw_pool(self, index: int) -> list[list[tuple[list[int], list[int], int]]]:
        rng = random.Random(f"{self.seed}/{index}")
        tasks = self.weights(index * POOL)
        names, weights = list(tasks), list(tasks.values())
        examples: list[Example] = []
        canvases: list[int] = []
        rows = POOL * self.tokens // 44  # a generous first guess; surplus rows are dropped
        for name in rng.choices(names, weights, k=rows):
            examples.append(TASKS[name].sample(rng, "train"))
            canvases.append(_draw_canvas(rng))
        encode = self.tokenizer.backend_tokenizer.encode_batch
        prompts = encode(
            [f"<|user|>{example.prompt}<|assistant|>" for example in examples],
            add_special_tokens=False,
        )
        answers = encode([example.answer for example in examples], add_special_tokens=False)
        triples = [
            (p.ids, a.ids, max(len(a.ids) + 1, canvas))
            for p, a, canvas in zip(prompts, answers, canvases, strict=True)
        ]
        triples.sort(key=lambda triple: len(triple[0]) + triple[2])
        size = len(triples) // POOL
        batches = []
        for i in range(POOL):
            batch = triples[i * size : (i + 1) * size]
            length = _length(batch)
            batches.append(rng.sample(batch, min(len(batch), max(1, self.tokens // length))))
        rng.shuffle(batches)
        return batches

    def _collate(self, rows: list[tuple[list[int], list[int], int]]) -> Batch:
        length = _length(rows)
        eos = int(self.tokenizer.eos_token_id)
        ids = torch.full((len(rows), length), eos)
        answer = torch.zeros((len(rows), length), dtype=torch.bool)
        tail = torch.zeros((len(rows), length), dtype=torch.bool)
        for i, (p, a, _) in enumerate(rows):
            ids[i, : len(p) + len(a)] = torch.tensor(p + a)
            answer[i, len(p) :] = True
            tail[i, len(p) + len(a) + 1 :] = True
        return Batch(ids, answer, tail)


def _length(rows: list[tuple[list[int], list[int], int]]) -> int:
    """Positions of a batch, rounded up: matrix libraries prepare themselves once per shape."""
    length = max(len(p) + canvas for p, _, canvas in rows)
    return length + -length % 8


def _draw_canvas(rng: random.Random) -> int:
    """Canvas lengths: mostly as short as the answer, else one block or the default canvas."""
    return rng.choices((1, CANVAS // 2, CANVAS), (12, 3, 5))[0]
