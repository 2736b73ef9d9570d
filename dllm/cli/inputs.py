"""Where prompts come from: the command line, a file, standard input."""

import sys
from collections.abc import Callable
from pathlib import Path

from ..core.errors import PromptError
from ..core.json_lines import read_json_lines

STDIN = "-"


def read_text(prompt: str | None, file: Path | None) -> str:
    """The prompt argument, the content of ``file``, or standard input (also for ``-``).

    One line break at the end of a file or of standard input does not belong to the text.
    """
    if prompt is not None and file is not None:
        raise PromptError("a prompt and --file are given: keep one of them")
    source = prompt if file is None else str(file)
    if source is None and sys.stdin.isatty():
        raise PromptError("there is no prompt: pass it as an argument, with --file, or on stdin")
    if source is None or source == STDIN:
        text = _content(sys.stdin.read, "standard input")
    elif file is not None:
        text = _content(lambda: file.read_text(encoding="utf-8"), str(file))
    else:
        text = _checked(source, "the prompt")
    if not text.strip():
        raise PromptError(f"{file or 'the prompt'} is empty: give text (argument, file, stdin)")
    return text


def read_prompts(prompt: str | None, file: Path | None) -> list[str]:
    """One prompt, or one per line of a ``.jsonl`` file: a string, or an object with ``prompt``."""
    if prompt is not None or file is None or file.suffix != ".jsonl":
        return [read_text(prompt, file)]
    result = []
    for where, entry in read_json_lines(file, "prompts"):
        text = entry["prompt"] if isinstance(entry, dict) and [*entry] == ["prompt"] else entry
        if not isinstance(text, str) or not text.strip():
            raise PromptError(
                f'{where} is no prompt: write "a text" or {{"prompt": "a text"}}; requests with '
                "more fields are for dllm batch"
            )
        result.append(_checked(text, where))
    return result


def read_lines(file: Path) -> list[str]:
    """The prompts of a ``.jsonl`` file, or the lines of another file that are not blank.  Lines
    end at line feeds alone."""
    if file.suffix == ".jsonl":
        return read_prompts(None, file)
    return [line for line in read_text(None, file).split("\n") if line.strip()]


def _content(read: Callable[[], str], source: str) -> str:
    try:
        text = _checked(read(), source).removeprefix("\ufeff")  # of Windows, as its line breaks
        return text.replace("\r\n", "\n").removesuffix("\n")
    except OSError as error:
        raise PromptError(f"cannot read {source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{source} is not valid UTF-8: {error}") from error


def _checked(text: str, source: str) -> str:
    """Bytes that are no UTF-8 arrive from the shell as lone surrogates."""
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise PromptError(f"{source} is not valid UTF-8")
    return text
