"""``dllm generate``: answers to prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.config import GenerationConfig
from ..core.declared import MACHINE
from ..core.errors import ConfigError
from .bundled import warn_of_unknown_words
from .generate_options import Answers
from .inputs import read_prompts
from .options import takes
from .output import as_json, note, save_traces, trace_files
from .speculate import speculate
from .watch import watch

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..runtime.result import Result


# Options of the help page; --help-all has all.
SHOWN = (
    "file model sampler cache max_new_tokens block_length temperature seed "
    "json_schema regex choice verifier drafter quantization watch json"
).split()


@takes(Answers)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", help="Read the prompt from a file; of a .jsonl file, one per line."
        ),
    ] = None,
    *,
    options: Answers,
) -> None:
    """Answer a prompt.  The answer goes to stdout, figures and --watch to stderr.

    For many prompts, and to resume after an interruption, use dllm batch.
    """
    prompts = read_prompts(prompt, file)
    for name in ("drafter", "search", "rule", "controller"):
        if getattr(options, name) and options.verifier is None:
            raise ConfigError(f"--{name} goes with --verifier: name the model that verifies")
    if options.verifier is not None:
        return speculate(prompts, options)
    files = trace_files(options.trace, len(prompts))
    model = options.load()
    for number, result in enumerate(answers(model, prompts, options)):
        if files:
            save_traces([result], [files[number]])
        about = {"prompt": prompts[number], "arguments": settled(options)}
        print(as_json(result, model, about) if options.json else result.text, flush=True)
        if not options.json or options.watch:
            note(result.footer())
    warn_of_unknown_words(model, prompts)


def answers(model: DiffusionModel, prompts: list[str], options: Answers) -> Iterator[Result]:
    """The results in the order of the prompts, each as soon as it is its turn."""
    from ..api import as_completed, stream

    given: dict[str, Any] = options.arguments() | options.parts()
    given |= {"chat": False if options.raw else None, "trace": options.trace is not None}
    if options.watch:
        events = stream(model, prompts, **given)
        yield from watch(events, model, len(prompts))
        return
    ready: dict[int, Result] = {}
    following = 0
    for number, result in as_completed(model, prompts, **given):
        ready[number] = result
        while following in ready:
            yield ready.pop(following)
            following += 1


def settled(options: Answers) -> dict[str, Any]:
    """The given arguments that change an answer, as JSON has them."""
    given = dict(options.arguments())
    given |= {"raw": True} if options.raw else {}
    engine = (*GenerationConfig.fields(MACHINE), "seed", "top_candidates")
    result: dict[str, Any] = json.loads(
        json.dumps({k: v for k, v in given.items() if k not in engine}, default=str)
    )
    return result
