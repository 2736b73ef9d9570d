"""Many prompts, a line each: which there are, which have their answer already, and where those go.

Answers are written as they are finished, so that nothing is lost when the run is stopped: as text
in the order of the lines, as JSON at once with the number of the line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..core.errors import ConfigError
from ..core.json_lines import check_same, whole_lines
from .output import check_output, interactive, stderr

# What all answers of a file have in common.
SAME = ("model", "sampler", "cache", "seed", "dtype", "arguments")


@dataclass(frozen=True)
class Question:
    """A prompt: ``index`` of its line, counted from 0 and with blank ones; ``sample``: which of
    its answers this will be."""

    index: int
    prompt: str
    sample: int = 0

    @property
    def key(self) -> tuple[int, int]:
        return self.index, self.sample


class Printer:
    """Answers as text, in order; a blank line of the input is a blank line of the output."""

    def __init__(self, questions: Iterable[Question], lines: int) -> None:
        self._order = [question.key for question in questions]
        self._waiting: dict[tuple[int, int], tuple[str, str]] = {}
        self._lines, self._line = lines, 0

    def add(self, question: Question, text: str, footer: str) -> Iterator[tuple[str, str]]:
        """What can be written now: (text, footer) of this answer and of those that waited for it;
        blank lines have no footer."""
        self._waiting[question.key] = text, footer
        while self._order and self._order[0] in self._waiting:
            key = self._order.pop(0)
            for _ in range(self._line, key[0]):
                yield "", ""
            self._line = key[0] + 1
            yield self._waiting.pop(key)
        if not self._order:
            for _ in range(self._line, self._lines):
                yield "", ""
            self._line = self._lines


@dataclass
class Journal:
    """A file of JSON lines that a later run goes on with."""

    path: Path
    about: Mapping[str, Any]
    done: set[tuple[int, int]] = field(default_factory=set)
    _file: IO[str] | None = None

    @classmethod
    def open(
        cls, path: Path, resume: bool, questions: Iterable[Question], about: Mapping[str, Any]
    ) -> Journal:
        """``about``: values of `SAME`, which the answers that are there must share.

        Raises `ConfigError` where they do not, or answer other prompts.
        """
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} keeps no answers: name a file with --output")
        check_output(path, "answers ")
        journal = cls(path, about)
        if path.exists() and path.stat().st_size:
            if not resume:
                raise ConfigError(
                    f"{path} holds answers already: go on with it by --resume, or name another file"
                )
            journal._read({question.key: question.prompt for question in questions})
        journal._file = path.open("a", encoding="utf-8")
        return journal

    def _read(self, prompts: Mapping[tuple[int, int], str]) -> None:
        for number, line in enumerate(whole_lines(self.path), 1):
            try:
                entry = json.loads(line)
                key = entry["index"], entry.get("sample", 0)
                prompt, about = entry["prompt"], {name: entry.get(name) for name in SAME}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise ConfigError(f"line {number} of {self.path} is no answer: repair it") from None
            if prompts.get(key) != prompt:
                raise ConfigError(
                    f"line {number} of {self.path} answers another prompt: name another file"
                )
            check_same(f"line {number} of {self.path}", about, self.about)
            self.done.add(key)

    def add(self, line: str) -> None:
        assert self._file is not None
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class Bar:
    """Texts that are finished, on a terminal's stderr; silent elsewhere."""

    def __init__(self, total: int) -> None:
        columns = ("{task.completed}/{task.total} texts", BarColumn(),
                   TextColumn("{task.fields[rate]}"), TimeRemainingColumn())  # fmt: skip
        # Redirecting would send what is printed to stdout to stderr, where the bar is.
        self._progress = Progress(
            *columns, console=stderr(), redirect_stdout=False, redirect_stderr=False,
            disable=not interactive() or total < 2, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=total, rate="")
        self._decided = self._forwards = 0

    def advance(self, decided: int, forwards: int) -> None:
        """One more, with its tokens and forwards."""
        self._decided, self._forwards = self._decided + decided, self._forwards + forwards
        rate = f"{self._decided / max(1, self._forwards):.2f} tokens per forward"
        self._progress.update(self._task, advance=1, rate=rate)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While something is printed to the same terminal."""
        if self._progress.disable or not sys.stdout.isatty():
            yield
            return
        self._progress.stop()
        yield
        self._progress.start()

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
