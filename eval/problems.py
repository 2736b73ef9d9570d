"""Tasks by name: the generated ones, and files of questions with answers.

A file is JSON lines with ``prompt`` (a string or chat messages) and ``answer``; an answer is right
when it equals the reference up to blanks at its ends, or contains it where the line has
``"match": "contains"``.
"""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, PromptError, UnknownNameError
from ..core.json_lines import read_json_lines
from ..models import DiffusionModel
from ..request.prompts import checked, encode
from .tasks import TASKS, Example, Task

MATCHES = ("equals", "contains")
MOST = 100_000  # examples that are drawn of a task


@dataclass(frozen=True)
class Question:
    """One line of a file."""

    task: str
    prompt: Any
    answer: str
    match: str = "equals"


@dataclass(frozen=True)
class FileTask:
    """The questions of a file, in an order that the seed decides (0: as they stand)."""

    name: str
    questions: tuple[Question, ...]

    def examples(self, n: int, seed: int = 0) -> list[Question]:
        """The first ``n`` questions; raises `ConfigError` when there are fewer."""
        if n > len(self.questions):
            raise ConfigError(
                f"{self.name} holds {len(self.questions)} questions, not {n}: ask for fewer, e.g. "
                f"-n {len(self.questions)}"
            )
        order = list(self.questions)
        if seed:
            random.Random(seed).shuffle(order)
        return order[:n]

    def check(self, question: Question, text: str) -> bool:
        """Whether ``text`` answers it."""
        if question.match == "contains":
            return question.answer.strip() in text
        return question.answer.strip() == text.strip()


AnyTask = Task | FileTask


def read_file(path: Path) -> FileTask:
    """A task from JSON lines.  Raises `ConfigError` with the line that is wrong."""
    entries = read_json_lines(path, "questions")
    return FileTask(path.stem, tuple(_question(path.stem, *entry) for entry in entries))


def _question(task: str, where: str, result: Any) -> Question:
    given = result if isinstance(result, Mapping) else {"answer": ""}
    missing = {"prompt"} - given.keys() | {"answer"} - {k for k in given if given[k] is not None}
    if missing:
        raise ConfigError(f"{where} lacks {' and '.join(sorted(missing))}")
    try:
        prompt = checked(result["prompt"])
    except PromptError as error:
        raise ConfigError(f"{where}: {error}") from None
    match = result.get("match", "equals")
    if match not in MATCHES:
        raise UnknownNameError(f"match in {where}", match, MATCHES)
    return Question(task, prompt, str(result["answer"]), match)


def find_task(name: str) -> AnyTask:
    """The task of that name, or in that file.  Raises `UnknownNameError` or `ConfigError`."""
    if name in TASKS:
        return TASKS[name]
    if name.endswith(".jsonl"):
        return read_file(Path(name))
    raise UnknownNameError("task", name, TASKS)


def draw(task: AnyTask, n: int, seed: int = 0) -> list[Any]:
    """``n`` examples of a task, no two of them alike.

    A generated task repeats itself where there are few instances: what was drawn before is passed
    over, and where long nothing else came it has no more.  Raises `ConfigError` then, and where
    more than `MOST` are wanted.  Files are as they stand.
    """
    if not isinstance(task, Task):
        return task.examples(n, seed)
    if n > MOST:
        raise ConfigError(f"{task.name} draws at most {MOST} examples, not {n}: ask for fewer")
    result: dict[str, Any] = {}
    latest = 0
    for number, example in enumerate(task.stream(seed)):
        if number - latest > 1000 + 4 * len(result):
            break
        if result.setdefault(example.prompt, example) is example:
            latest = number
        if len(result) == n:
            return list(result.values())
    raise ConfigError(
        f"{task.name} has only {len(result)} different prompts, not {n}: ask for fewer"
    )


def stamp(task: AnyTask) -> str:
    """What identifies the content of a task beyond its name: a file's questions may change."""
    if isinstance(task, Task):
        return ""
    return "#" + hashlib.blake2b(repr(task.questions).encode(), digest_size=8).hexdigest()


def check_fits(model: DiffusionModel, examples: Sequence[Example], new: int, name: str) -> None:
    """Raise `ConfigError` unless the model can read every example and has room to answer."""
    limit = model.facts.context_length
    for example in examples:
        size = len(encode(model, example.prompt))
        if size + new > limit:
            raise ConfigError(
                f"task {name} has a prompt of {size} tokens, with {new} new ones more than the "
                f"context of {limit}: choose another task or a smaller max_new_tokens"
            )
