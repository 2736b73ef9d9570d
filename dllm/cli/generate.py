"""``dllm generate``: answers to prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from . import remote
from .inputs import read_prompts
from .options import DECODING, DRAFTING, OUTPUT, Generation, option, takes
from .output import as_json, interactive, note, save_traces, trace_files
from .speculate import speculate
from .watch import watch

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..result import Result


@dataclass(frozen=True, kw_only=True)
class Answers(Generation):
    """Options of ``dllm generate``."""

    top_candidates: Annotated[
        int | None,
        option("--top-candidates", panel=OUTPUT, text="Candidates per position in the trace."),
    ] = None
    verifier: Annotated[
        str | None,
        option("--verifier", panel=DRAFTING, text="Autoregressive model whose text it will be."),
    ] = None
    drafter: Annotated[
        list[str] | None,
        option(
            "--drafter",
            panel=DRAFTING,
            text="With --verifier: what proposes tokens, a model or e.g. prompt_lookup; "
            "repeatable, the first that has something to say; default --model; 'none'.",
        ),
    ] = None
    search: Annotated[
        str | None, option("--search", panel=DRAFTING, text="How a draft is found, e.g. cps.")
    ] = None
    rule: Annotated[
        str | None, option("--rule", panel=DRAFTING, text="How drafts are accepted, e.g. keyed.")
    ] = None
    controller: Annotated[
        str | None,
        option("--controller", panel=DRAFTING, text="Length of drafts, e.g. 'fixed(k=8)'."),
    ] = None
    raw: Annotated[
        bool, option("--raw", panel=DECODING, text="Take the prompt as it is: no chat template.")
    ] = False
    json: Annotated[
        bool, option("--json", panel=OUTPUT, text="Print one JSON object per prompt.")
    ] = False
    trace: Annotated[
        Path | None, option("--trace", panel=OUTPUT, text="Write every step to this JSON file.")
    ] = None

    @property
    def drafters(self) -> list[str]:
        """Names of drafters; none for plain decoding."""
        named = self.drafter or [self.model]
        return [] if named == ["none"] else named


@takes(Answers)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Every line is a prompt; all run as one batch.")
    ] = False,
    *,
    options: Answers,
) -> None:
    """Answer a prompt.  The answer goes to stdout, figures and --watch to stderr."""
    prompts = read_prompts(prompt, file, lines)
    if options.server is not None:
        if options.verifier is not None:
            raise ConfigError("--verifier does not go with --server: serve the verifier")
        remote.generate(options.server, prompts, options, trace_files(options.trace, len(prompts)))
        return
    if options.verifier is not None:
        speculate(prompts, options)
        return
    for name in ("drafter", "search", "rule", "controller"):
        if getattr(options, name):
            raise ConfigError(f"--{name} goes with --verifier: name the model that verifies")
    files = trace_files(options.trace, len(prompts))
    model = options.load()
    results = run(model, prompts, options)
    save_traces(results, files)
    for result in results:
        print(as_json(result, model) if options.json else result.text, flush=True)
        if not options.json or options.watch:
            note(result.footer())


def run(model: DiffusionModel, prompts: list[str], options: Answers) -> list[Result]:
    """All prompts as one batch, watched or not."""
    from ..api import generate as api_generate
    from ..api import stream

    given: dict[str, Any] = options.arguments() | {
        "sampler": options.sampler,
        "cache": options.cache,
        "chat": False if options.raw else None,
        "trace": options.trace is not None,
    }
    if options.watch:
        return watch(stream(model, prompts, **given), model, len(prompts), options.delay)
    bar = interactive() and not options.json
    results: list[Result] = api_generate(model, prompts, progress=bar, **given)
    return results
