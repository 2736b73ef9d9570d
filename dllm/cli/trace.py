"""``dllm trace``: a recorded generation as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import check_output, note


def trace(
    files: Annotated[list[Path], typer.Argument(help="One trace, or two to compare.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page, default beside the trace.", show_default=False
        ),
    ] = None,
) -> None:
    """Turn traces into one self-contained HTML page with a step slider.

    Record one with: dllm generate PROMPT --trace run.json --top-candidates 5
    """
    from ..eval.page import read_trace, trace_page

    target = output or files[0].with_suffix(".html")
    page = trace_page([read_trace(file) for file in files], " · ".join(f.stem for f in files))
    check_output(target, "the page ")
    target.write_text(page, encoding="utf-8")
    note(f"written: {target}")
