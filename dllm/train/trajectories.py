"""How a model decoded its own answers, as training data.

``*.jsonl``, one answer a line: {"ids": the whole text, "answer": where the answer starts, "order":
the step that decided each token of the answer, -1 where none did because an end of text made it
needless}; optionally "text", the answer in words, and "right", whether a bundled task accepts it.
"""

import json
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..api import generate
from ..core.errors import ConfigError
from ..core.json_lines import name_in_errors, write_whole
from ..drafting.api import speculate
from ..eval.tasks import TASKS
from ..models import DiffusionModel
from .batches import AnswerBatches, answer_ids, examples, padded
from .objectives.parallel import NEVER

PIECE = 64  # prompts decoded together, and repeated when a stopped run goes on


@dataclass(frozen=True)
class Trajectory:
    """``ids`` of prompt and answer, which starts at ``start``; ``order`` of the answer's tokens."""

    ids: tuple[int, ...]
    start: int
    order: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A prompt, and the bundled task and number that say what a right answer is."""

    prompt: Any
    task: str | None = None
    example: Any = None

    def right(self, text: str) -> bool | None:
        """Whether ``text`` answers it; None where nobody knows."""
        return None if self.task is None else bool(TASKS[self.task].check(self.example, text))


def task_questions(
    count: int, seed: int, tasks: Sequence[str] = tuple(TASKS), split: str = "train"
) -> list[Question]:
    """Prompts of the generated tasks, all of them equally often."""
    rng = random.Random(f"questions/{split}/{seed}")
    drawn = [(name, TASKS[name].sample(rng, split)) for name in rng.choices(tasks, k=count)]
    return [Question(example.prompt, name, example) for name, example in drawn]


def write_trajectories(
    model: DiffusionModel, questions: Sequence[Question], file: Path,
    sampler: str = "threshold(0.9)", only_right: bool = True, samples: int = 1, **arguments: Any,
) -> Iterator[int]:  # fmt: skip
    """Decode ``questions`` with ``sampler`` and append what happened to ``file``; yields how many
    are done.  A stopped run goes on with the piece of work that was not finished.

    ``only_right``: leave out answers that a task rejects; of several ``samples`` of a question (set
    a ``temperature``) the one of the fewest forwards is kept.
    """

    def decode(here: slice) -> Iterator[dict[str, Any]]:
        piece = questions[here]
        results = generate(
            model, [q.prompt for q in piece for _ in range(samples)], sampler=sampler, trace=True,
            seed=here.start, **arguments,
        )  # fmt: skip
        for number, question in enumerate(piece):
            tried = results[number * samples : (number + 1) * samples]
            if only_right:
                tried = [r for r in tried if question.right(r.text) is not False]
            if tried:
                result = min(tried, key=lambda r: r.nfe)
                yield entry(result) | {"right": question.right(result.text)}

    yield from write_pieces([q.prompt for q in questions], file, decode)


def write_answers(
    model: DiffusionModel, questions: Sequence[Question], file: Path, multiple: int = 1,
    length: int | None = None,
) -> Iterator[int]:  # fmt: skip
    """The `greedy` answers of an autoregressive model in the same form, ended to a ``multiple`` of
    tokens; ``length``: tokens of an answer at most (None: the model's default, or 256)."""
    length = length or model.generation_defaults.get("max_new_tokens", 256)
    prompts = [question.prompt for question in questions]

    def decode(here: slice) -> Iterator[dict[str, Any]]:
        for ids, start in greedy(model, None, prompts[here], length):
            rest, answered = -len(ids) % multiple, len(ids) - start
            order = [0] * answered + [-1] * rest
            ids += [model.facts.eos_token_id or 0] * rest
            yield {"ids": ids, "answer": start, "order": order}

    yield from write_pieces(prompts, file, decode)


def greedy(
    model: DiffusionModel, drafter: Any, prompts: Sequence[Any], length: int, **how: Any
) -> Iterator[tuple[list[int], int]]:
    """Ids of each prompt and its answer by an autoregressive model, and where the answer starts: at
    most ``length`` tokens, and what the context leaves behind the prompt."""
    # As its own default it gives way to the context, prompt by prompt.
    defaults = {**model.generation_defaults, "max_new_tokens": length}
    model = replace(model, generation_defaults=defaults)
    for result in speculate(model, drafter, list(prompts), temperature=0.0, **how):
        start = result.prompt_length
        yield [*result.sequences[:start].tolist(), *result.tokens], start


def write_pieces(
    prompts: Sequence[Any], file: Path, decode: Callable[[slice], Iterable[dict[str, Any]]],
    *how: Any,
) -> Iterator[int]:  # fmt: skip
    """Append what ``decode`` makes of pieces of the prompts, and note how many are done, how long
    the file then is, what they ask, and ``how``: a piece that a killed run has begun to write is
    cut off.  Raises `ConfigError` for other prompts, or others of ``how``."""

    def asked() -> list[int]:
        return [zlib.crc32(repr(part).encode()) for part in ([*prompts[:done]], how)]

    def note() -> None:
        write_whole(state, " ".join(map(str, (done, file.stat().st_size, *asked()))))

    file.touch()
    state, size = file.with_suffix(".done"), file.stat().st_size
    try:
        done, length, *of = map(int, state.read_text().split()) if state.exists() else (0, size)
    except ValueError as error:
        raise ConfigError(
            f"{state} is damaged: delete it and {file.name}, and the answers are decoded again"
        ) from error
    if length > size:  # the answers were deleted
        done = length = 0
    if done and of != asked()[: len(of)]:  # earlier versions noted less
        raise ConfigError(
            f"{file} answers other prompts, or in another way: choose another folder or repeat its "
            "options"
        )
    os.truncate(file, length)
    note()
    while done < len(prompts):
        here = slice(done, min(done + PIECE, len(prompts)))
        lines = [json.dumps(entry) + "\n" for entry in decode(here)]
        with name_in_errors(file), file.open("a", encoding="utf-8") as out:
            out.writelines(lines)
        done = here.stop
        note()
        yield done


def entry(result: Any) -> dict[str, Any]:
    """A decoded answer, with its trace, in the form of a line."""
    ids, start = result.sequences.tolist(), result.prompt_length
    order = [-1] * (len(ids) - start)
    for number, step in enumerate(result.trace.steps):
        for position, _, _ in step.commits:
            order[position - start] = number
    return {"ids": ids, "answer": start, "order": order, "text": result.text}


def read_trajectories(
    path: Path, vocabulary: int | None = None, context: int | None = None
) -> list[Trajectory]:
    """The answers of a file, of ids below ``vocabulary``, and at most ``context`` of them.  Raises
    `ConfigError` for a line of another form."""

    def make(entry: Any) -> Trajectory:
        ids, start = answer_ids(entry, vocabulary, context)
        order = tuple(entry["order"])
        if not all(type(step) is int and step < NEVER for step in order):
            raise ValueError(f"a step is a whole number below {NEVER}")
        if len(order) != len(ids) - start:
            raise ValueError(f"an order of {len(order)} steps for {len(ids) - start} answer tokens")
        return Trajectory(ids, start, order)

    return [*examples(path, "right answers", '{"ids": [...], "answer": n, "order": [...]}', make)]


class Batches(AnswerBatches):
    """Tokens that were never decided are masked in every state (their order is `NEVER`).  ``hints``
    (ids before and behind an answer) show the teacher each answer in front of its prompt, in whole
    blocks of ``block`` tokens, so that those of the text stay as they are."""

    def __init__(
        self, answers: Sequence[Trajectory], rows: int, steps: int, seed: int,
        hints: tuple[Sequence[int], Sequence[int]] | None = None, block: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(answers, rows, steps, seed)
        self.hints, self.block = hints, block

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        chosen, rng = self.chosen(index)
        orders = [[-1] * answer.start + [NEVER if step < 0 else step for step in answer.order]
                  for answer in chosen]  # fmt: skip
        batch = {
            "ids": padded(answer.ids for answer in chosen),
            "order": padded(orders, -1),
            "valid": padded([True] * len(answer.ids) for answer in chosen),
            "progress": torch.tensor(index / max(1, self.count)),
            "seed": torch.tensor(rng.getrandbits(31)),
        }
        if self.hints is not None:
            before, behind = self.hints
            shown = [[*before, *answer.ids[answer.start :], *behind] for answer in chosen]
            whole = ([-1] * (-len(ids) % self.block) + ids for ids in shown)
            batch["hint"] = padded(whole, -1, "left")
        return batch
