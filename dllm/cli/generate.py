"""``dllm generate``: answers to prompts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.config import GenerationConfig
from ..core.declared import MACHINE
from ..core.errors import ConfigError
from . import remote
from .bundled import warn_of_unknown_words
from .generate_options import Answers
from .inputs import read_prompts
from .lines import Bar, Journal, Printer, Question
from .options import takes
from .output import as_json, note, save_traces, text_of, trace_files
from .speculate import speculate
from .watch import watch

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..runtime.result import Result


@takes(Answers)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Every line is a prompt; answers come as they finish.")
    ] = False,
    *,
    options: Answers,
) -> None:
    """Answer a prompt.  The answer goes to stdout, figures and --watch to stderr.

    With --lines a line of the input is a prompt.  Texts come in the order of the lines, JSON as it
    is ready, with the line's number from 0 as "index".
    """
    prompts = read_prompts(prompt, file, lines)
    questions = [
        Question(index, text, sample)
        for index, text in enumerate(prompts)
        for sample in range(options.n)
        if text.strip()
    ]
    options.check(options.raw)
    if options.resume and (options.output is None or options.watch):
        raise ConfigError(
            "--resume goes on with a file of answers: name it with --output, and drop --watch"
        )
    for name in ("drafter", "search", "rule", "controller"):
        if getattr(options, name) and options.verifier is None:
            raise ConfigError(f"--{name} goes with --verifier: name the model that verifies")
    if options.server is not None:
        if options.verifier is not None:
            raise ConfigError("--verifier does not go with --server: serve the verifier")
        if options.output is not None or options.n > 1 or options.ids:
            raise ConfigError("--output, -n and --ids are not for --server: use dllm batch there")
        asked = [question.prompt for question in questions]
        remote.generate(options.server, asked, options, trace_files(options.trace, len(asked)))
        return
    if options.verifier is not None:
        if options.output is not None or options.n > 1:
            raise ConfigError("--output and -n are not for --verifier: leave them out")
        speculate([options.prompt(question.prompt) for question in questions], options)
        return
    files = trace_files(options.trace, len(questions))
    model = options.load()
    if options.watch and model.tokenizer is None:
        raise ConfigError(f"{model.name} came without a tokenizer: there is no text to watch")
    answer(model, questions, len(prompts), options, files)
    if not options.ids:
        warn_of_unknown_words(model, [question.prompt for question in questions])


def answer(
    model: DiffusionModel,
    questions: list[Question],
    lines: int,
    options: Answers,
    files: list[Path],
) -> None:
    """Write every answer as soon as it is there; ``lines``: of the input, with blank ones."""
    printer, journal, asked = Printer(questions, lines), None, questions
    if options.output is not None:
        about = {
            "model": model.name,
            **options.parts(),
            "seed": options.how.get("seed", 0),
            "dtype": str(model.dtype).removeprefix("torch."),
            "arguments": settled(options),
        }
        journal = Journal.open(options.output, options.resume, questions, about)
        asked = [question for question in questions if question.key not in journal.done]
    done = 0
    try:
        with Bar(len(asked)) as bar:
            for number, result in run(model, questions, asked, options):
                done += 1
                question = asked[number]
                if files:
                    save_traces([result], [files[questions.index(question)]])
                bar.advance(result.decided, result.nfe)
                with bar.hidden():
                    write(question, result, model, options, printer, journal)
    except KeyboardInterrupt:
        rest = "--resume goes on" if journal else "with --output FILE, --resume could go on"
        note(f"stopped: {done} of {len(asked)} answered; {rest}")
        raise
    finally:
        if journal is not None:
            journal.close()
    if journal is not None:
        note(f"{done} answered, {len(journal.done)} were there: {options.output}")


def settled(options: Answers) -> dict[str, Any]:
    """What was given of the arguments that change an answer, as JSON has it."""
    given = dict(options.arguments())
    given |= {name: True for name in ("raw", "ids") if getattr(options, name)}
    engine = (*GenerationConfig.fields(MACHINE), "seed", "top_candidates")
    result: dict[str, Any] = json.loads(
        json.dumps({k: v for k, v in given.items() if k not in engine}, default=str)
    )
    return result


def write(
    question: Question, result: Result, model: DiffusionModel, options: Answers, printer: Printer,
    journal: Journal | None,
) -> None:  # fmt: skip
    """An answer, and figures on stderr."""
    if not options.json and journal is None:
        for text, footer in printer.add(question, text_of(result, model), result.footer()):
            print(text, flush=True)
            if footer:
                note(footer)
        return
    line = as_json(result, model, asdict(question) | {"arguments": settled(options)})
    if journal is not None:
        journal.add(line)
    else:
        print(line, flush=True)
    if options.watch:
        note(result.footer())


def run(
    model: DiffusionModel, questions: list[Question], asked: list[Question], options: Answers
) -> Iterable[tuple[int, Result]]:
    """Results of those that are ``asked``, by their number, as they are finished.  An answer does
    not depend on which of the ``questions`` are asked beside it."""
    from ..api import as_completed, stream
    from ..request.prompts import encode
    from ..request.requests import occurrences

    chat = False if options.raw else None
    ids = [encode(model, options.prompt(q.prompt), chat).tobytes() for q in questions]
    repetition = dict(zip((q.key for q in questions), occurrences(ids), strict=True))
    given: dict[str, Any] = options.arguments() | options.parts()
    given |= {"chat": chat, "trace": options.trace is not None}
    prompts = [options.prompt(question.prompt) for question in asked]
    if not asked:
        return ()
    if options.watch:
        events = stream(model, prompts, **given)
        return enumerate(watch(events, model, len(prompts), options.delay))
    rows = [repetition[question.key] for question in asked]
    return as_completed(model, prompts, repetitions=rows, **given)
