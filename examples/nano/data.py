"""Batches of generated tasks as token ids.

A row is ``prompt | answer | end tokens``.  Rows of similar length share a batch, so that little is
spent on end tokens; step ``i`` of a recipe always sees the same batch, which makes runs resumable.
"""

import random
from collections.abc import Callable, Mapping

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from dllm.eval.tasks import TASKS

CANVAS = 64  # the canvas the bundled models are used with by default
POOL = 8  # batches drawn together and sorted by length

Row = tuple[list[int], list[int], int]  # prompt ids, answer ids, positions of the canvas


class TaskStream(Dataset[dict[str, torch.Tensor]]):
    """The batch of each of ``steps`` steps, about ``tokens`` token positions.

    ``ids`` (B, L) int64; ``answer`` (B, L) bool marks what the model has to write, ``tail`` (B, L)
    bool end tokens after the first; ``seed`` of the step's draws.  ``weights`` maps a step to how
    often each task is drawn then.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        weights: Callable[[int], Mapping[str, float]],
        tokens: int,
        seed: int,
        steps: int = 1,
    ) -> None:
        self.tokenizer, self.weights, self.tokens = tokenizer, weights, tokens
        self.seed, self.steps = seed, steps
        self._pool: list[list[Row]] = []
        self._pool_index = -1

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        index, offset = divmod(step, POOL)
        if index != self._pool_index:
            self._pool, self._pool_index = self._draw_pool(index), index
        seed = torch.tensor(self.seed * 1_000_003 + step)
        return self._collate(self._pool[offset]) | {"seed": seed}

    def _draw_pool(self, index: int) -> list[list[Row]]:
        """`POOL` batches of rows of similar length, each as full as the budget allows."""
        rng = random.Random(f"{self.seed}/{index}")
        rows: list[Row] = []
        batches: list[list[Row]] = []
        while len(batches) < POOL:
            rows += self._draw_rows(rng, 256, self.weights(index * POOL))
            rows.sort(key=lambda row: len(row[0]) + row[2])
            batches = self._split(rows)
        return rng.sample(batches, POOL)

    def _draw_rows(self, rng: random.Random, count: int, tasks: Mapping[str, float]) -> list[Row]:
        names = rng.choices(list(tasks), list(tasks.values()), k=count)
        examples = [TASKS[name].sample(rng, "train") for name in names]
        encode = self.tokenizer.backend_tokenizer.encode_batch
        prompts = encode(
            [f"<|user|>{example.prompt}<|assistant|>" for example in examples],
            add_special_tokens=False,
        )
        answers = encode([example.answer for example in examples], add_special_tokens=False)
        return [
            (p.ids, a.ids, max(len(a.ids) + 1, _draw_canvas(rng)))
            for p, a in zip(prompts, answers, strict=True)
        ]

    def _split(self, rows: list[Row]) -> list[list[Row]]:
        """Full batches of neighbours, from the longest rows down; the shortest may be left."""
        batches: list[list[Row]] = []
        left = len(rows)
        while left:
            size = min(left, max(1, self.tokens // _length(rows[left - 1 : left])))
            if size == left:
                break
            batches.append(rows[left - size : left])
            left -= size
        return batches

    def _collate(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        length = _length(rows)
        eos = int(self.tokenizer.eos_token_id)
        ids = torch.full((len(rows), length), eos)
        answer = torch.zeros((len(rows), length), dtype=torch.bool)
        tail = torch.zeros((len(rows), length), dtype=torch.bool)
        for i, (p, a, _) in enumerate(rows):
            ids[i, : len(p) + len(a)] = torch.tensor(p + a)
            answer[i, len(p) :] = True
            tail[i, len(p) + len(a) + 1 :] = True
        return {"ids": ids, "answer": answer, "tail": tail}


def _length(rows: list[Row]) -> int:
    """Positions of a batch, rounded up: matrix libraries prepare themselves once per shape."""
    length = max(len(p) + canvas for p, _, canvas in rows)
    return length + -length % 8


def _draw_canvas(rng: random.Random) -> int:
    """Canvas lengths: mostly as short as the answer, else one block or the default canvas."""
    return rng.choices((1, CANVAS // 2, CANVAS), (14, 3, 3))[0]
