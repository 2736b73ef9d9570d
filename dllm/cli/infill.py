"""``dllm infill``: fill the holes of a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from .bundled import warn_of_unknown_words
from .inputs import read_text
from .options import JSON, TRACE, Decoding, option, takes
from .output import as_json, note, save_trace, shown, trace_files, waiting


@dataclass(frozen=True, kw_only=True)
class Filling(Decoding):
    """Options of ``dllm infill``."""

    file: Path | None = option(None, "Read the text from a file.", None)
    json: bool = JSON()
    trace: Path | None = TRACE()
    PARAMETERS = Decoding.PARAMETERS | {"top_candidates"}


# Options of the help page; --help-all has all.
SHOWN = (
    "file model sampler cache temperature seed regex choice json_schema quantization trace json"
).split()


@takes(Filling)
def infill(
    text: Annotated[
        str | None,
        typer.Argument(
            help="Text with holes: [[8]] is one of 8 tokens, [[4..16]] of some between, [[*]] of "
            "up to 64.  '-' or nothing reads standard input."
        ),
    ] = None,
    *,
    options: Filling,
) -> None:
    """Fill the holes of a text; all of it goes to stdout, figures to stderr.

    Try: dllm infill "23 + 12: 3 + 2 =[[1]], 2 + 1 =[[1]]:[[2]]."
    """
    content = read_text(text, options.file)
    files = trace_files(options.trace, 1)
    model = options.load()
    from ..api import infill as api_infill

    with waiting("filling in"):
        result = api_infill(
            model, content, trace=options.trace is not None, **options.parts(), **options.how
        )
    for trace in files:
        save_trace(result, trace)
    print(as_json(result, model) if options.json else shown(result.text), flush=True)
    if not options.json:
        note(result.footer())
    warn_of_unknown_words(model, [content])
