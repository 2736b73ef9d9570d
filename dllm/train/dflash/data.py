"""Answers of the verifier as training data: a text file, and what its layers said.

``*.jsonl``: one answer a line, {"ids": prompt and answer, "answer": where the answer starts}.
Beside it, optionally, ``*.states``: for every token but the last the hidden states behind the
target layers and the normed last one, bfloat16, in the order of the lines, and ``*.states.json``,
which says of which layers, answers and weights; else the verifier computes them in training.
"""

import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...core.json_lines import read_state, write_whole
from ..batches import AnswerBatches, answer_ids, examples, padded
from .objective import Reader

TOGETHER = 8  # answers whose hidden states are computed together


@dataclass(frozen=True)
class Answer:
    """``ids`` of prompt and answer; the answer starts at ``start``; ``file`` and ``at`` say where
    its hidden states are, if anywhere."""

    ids: tuple[int, ...]
    start: int
    file: Path | None = None
    at: int = 0

    @property
    def tokens(self) -> int:
        return len(self.ids) - self.start

    def held_out(self, share: int) -> bool:
        """Whether the prompt belongs to the one in ``share`` that is never trained on."""
        return zlib.crc32(np.asarray(self.ids[: self.start], np.int64).tobytes()) % share == 0


def stamp(path: Path, verifier: Any) -> str:
    """What kept hidden states depend on: the answers of ``path``, some weights of ``verifier``."""
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16)
    for weight in verifier.parameters():
        digest.update(weight.detach().reshape(-1)[:64].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def kept_states(path: Path, layers: Sequence[int], verifier: Any = None) -> Path | None:
    """The file of hidden states beside the answers of ``path``, if it is complete, has ``layers``
    and is of these answers and the network ``verifier``, if one is named."""
    states, label = path.with_suffix(".states"), read_state(path.with_suffix(".states.json"))
    if not layers or not {*layers} <= {*label.get("layers", ())}:
        return None
    return states if verifier is None or label.get("of") == stamp(path, verifier) else None


def read_answers(path: Path, layers: Sequence[int] = (), verifier: Any = None) -> Iterator[Answer]:
    """The answers of a file, of ids that the network ``verifier`` has, with their hidden states
    where those of ``layers`` are kept.  Raises `ConfigError` for a line of another form."""
    make, kept, at = answer_ids, kept_states(path, layers, verifier), 0
    if verifier is not None:
        room = getattr(verifier.config.get_text_config(), "max_position_embeddings", None)
        size = len(verifier.get_input_embeddings().weight)
        make = partial(answer_ids, vocabulary=size, context=room)
    for ids, start in examples(path, "answers", '{"ids": [...], "answer": n}', make):
        yield Answer(ids, start, kept, at)
        at += len(ids) - 1


def write_states(path: Path, reader: Reader, layers: Sequence[int]) -> Iterator[int]:
    """Write ``*.states`` beside the answers of ``path``, if it is not there yet, for runs that see
    every answer several times; yields how many answers are done.  4 layers of a width of 576 take
    5.8 kB per token."""
    if kept_states(path, layers, reader.verifier) is not None:
        return
    about = {"layers": [*layers], "of": stamp(path, reader.verifier)}
    answers = list(read_answers(path, verifier=reader.verifier))
    label = path.with_suffix(".states.json")
    label.unlink(missing_ok=True)  # it speaks of what is written over now
    with path.with_suffix(".states").open("wb") as out:
        for first in range(0, len(answers), TOGETHER):
            part = answers[first : first + TOGETHER]
            ids = padded(answer.ids for answer in part)
            states = reader.read(ids.to(reader.device)).to(torch.bfloat16).cpu()
            for i, answer in enumerate(part):
                kept = states[i, : len(answer.ids) - 1].contiguous().view(torch.int16)
                out.write(kept.numpy().tobytes())
            yield first + len(part)
    write_whole(label, json.dumps(about) + "\n")


def loops(ids: Sequence[int]) -> bool:
    """Whether more than half of the 4-grams of a text are repetitions."""
    grams = list(zip(*(ids[i:] for i in range(4)), strict=False))
    return len(grams) > 16 and len(set(grams)) < len(grams) / 2


def common_tokens(answers: Sequence[Answer], count: int) -> torch.Tensor:
    """The ``count`` most frequent answer tokens, sorted by id."""
    seen: Counter[int] = Counter()
    for answer in answers:
        seen.update(answer.ids[answer.start :])
    return torch.tensor(sorted(token for token, _ in seen.most_common(count)))


class HiddenStates:
    """Rows of the files of hidden states, read where they lie: ``layers`` of a verifier of width
    ``size``, and its normed last hidden state behind them."""

    def __init__(self, layers: Sequence[int], size: int) -> None:
        self.layers, self.size = [*layers], size
        self._files: dict[Path, tuple[Any, list[int]]] = {}  # rows, and their parts that are read

    def read(self, answer: Answer) -> torch.Tensor:
        """(len(ids) - 1, (layers + 1) * size) bfloat16."""
        assert answer.file is not None
        if answer.file not in self._files:
            self._files[answer.file] = self._open(answer.file)
        rows, parts = self._files[answer.file]
        here = rows[answer.at : answer.at + len(answer.ids) - 1, parts]
        return torch.from_numpy(here).view(torch.bfloat16).flatten(1)

    def _open(self, file: Path) -> tuple[Any, list[int]]:
        kept = read_state(file.with_suffix(".states.json"))["layers"]
        flat, width = np.memmap(file, np.int16, "r"), (len(kept) + 1) * self.size
        rows = flat[: len(flat) // width * width].reshape(-1, len(kept) + 1, self.size)
        return rows, [*map(kept.index, self.layers), len(kept)]


class Batches(AnswerBatches):
    """Answers, and for each ``anchors`` random places to draft from."""

    def __init__(
        self, answers: Sequence[Answer], rows: int, anchors: int, seed: int, count: int,
        states: HiddenStates,
    ) -> None:  # fmt: skip
        super().__init__(answers, rows, count, seed)
        self.anchors, self.states = anchors, states

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        answers, rng = self.chosen(index)
        places = [range(answer.start, len(answer.ids) - 1) for answer in answers]
        anchors = [sorted(rng.sample(at, min(self.anchors, len(at)))) for at in places]
        batch = collate(answers, anchors, self.states)
        batch["seed"] = torch.tensor(rng.getrandbits(31))
        return batch


def collate(
    answers: Sequence[Answer], anchors: Sequence[Sequence[int]], states: HiddenStates
) -> dict[str, torch.Tensor]:
    """Padded tensors: ids (B, S), length (B,), anchors (B, N) with -1 where there is none, and,
    where they are kept, states (B, S, (layers + 1) * size)."""
    batch = {
        "ids": padded(answer.ids for answer in answers),
        "length": torch.tensor([len(answer.ids) for answer in answers]),
        "anchors": padded((torch.tensor(places, dtype=torch.int64) for places in anchors), -1),
    }
    if all(answer.file is not None for answer in answers):  # the last token of each has none
        batch["states"] = F.pad(padded(map(states.read, answers)), (0, 0, 0, 1))
    return batch
