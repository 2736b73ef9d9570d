"""``--watch``: the canvas on stderr while it is written.

On a terminal it is redrawn in place; elsewhere every step becomes one line, so that it can be
logged: ``«new»`` was just committed, ``‹guess›`` is a draft, ``░`` a mask, ``⏎`` a line break.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from .frames import COMMITTED, DRAFT, FRESH, MASK, REST, Frame, Speller, frame
from .output import interactive, stderr

if TYPE_CHECKING:
    from ..models import DiffusionModel
    from ..runtime.events import Event
    from ..runtime.result import Result

STYLES = {COMMITTED: "", FRESH: "bold green", DRAFT: "dim yellow", MASK: "dim", REST: "dim italic"}
MARKS = {FRESH: "«{}»", DRAFT: "‹{}›"}
REDRAW = 1 / 20  # seconds between two pictures, at least
BORDER = 2  # lines, and columns on each side
MARGIN = 2  # columns, so that a terminal's ^C does not wrap and shift the picture


def watch(events: Iterable["Event"], model: "DiffusionModel", rows: int) -> list["Result"]:
    """Show ``events`` until every row has its result."""
    assert model.tokenizer is not None
    speller = Speller(model.tokenizer, model.facts.stop_token_ids)
    results: dict[int, Result] = {}
    with shown_live() as show:
        for event in events:
            if event.result is not None:
                results[event.row] = event.result
            show(frame(event, speller))
    return [results[row] for row in range(rows)]


@contextmanager
def shown_live() -> Iterator[Callable[[Frame], None]]:
    """What shows a frame on stderr: redrawn on a terminal, else a line for each."""
    if not interactive():
        yield lambda frame: print(line(frame), file=sys.stderr, flush=True)
        return
    console = stderr()
    # The answer follows on the same terminal: then the picture gives way to it.
    with Live(
        console=console, auto_refresh=False, transient=sys.stdout.isatty(),
        vertical_overflow="crop",
    ) as live:  # fmt: skip
        picture = Picture(live)
        try:
            yield picture.show
        finally:
            picture.draw()


def line(frame: Frame) -> str:
    """A frame as one line of plain text."""
    body = "".join(MARKS.get(span.kind, "{}").format(span.text) for span in frame.spans)
    body = body.replace("\n", "⏎").replace("\t", "⇥")
    return f"row {frame.row} step {frame.step} {frame.decided}/{frame.total} │ {body}"


class Picture:
    """The newest frame of every row, redrawn in place."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.frames: dict[int, Frame] = {}
        self.drawn = 0.0

    def show(self, frame: Frame) -> None:
        self.frames[frame.row] = frame
        if time.perf_counter() - self.drawn >= REDRAW:
            self.draw()

    def draw(self) -> None:
        frames = [self.frames[row] for row in sorted(self.frames)]
        self.live.update(compose(frames, self.live.console), refresh=True)
        self.drawn = time.perf_counter()


def compose(frames: list[Frame], console: Console) -> RenderableType:
    """Panels of as many rows as fit, rows still being written first."""
    room = console.height - 1
    fit = max(1, room // (BORDER + 1))
    shown = sorted(frames, key=lambda f: (f.finished, f.row))[:fit]
    hidden = len(frames) - len(shown)
    height = max(1, (room - (hidden > 0)) // max(1, len(shown)) - BORDER)
    panels: list[RenderableType] = [
        panel(f, console, height, len(frames) > 1) for f in sorted(shown, key=lambda f: f.row)
    ]
    if hidden:
        panels.append(Text(f"… and {hidden} more rows", style="dim"))
    return Group(*panels)


def panel(frame: Frame, console: Console, height: int, numbered: bool) -> Panel:
    """A framed canvas, at most ``height`` lines of text: the last ones."""
    text, width = Text(tab_size=8), console.width - MARGIN
    for span in frame.spans:
        text.append(span.text, style=STYLES[span.kind])
    lines = text.wrap(console, max(1, width - 2 * BORDER), overflow="fold")
    rate = frame.decided / max(1, frame.nfe)
    figures = f"step {frame.step} · {frame.decided}/{frame.total} · {rate:.1f} tokens per forward"
    return Panel(
        Text("\n").join(lines[-height:]), title=f"row {frame.row}" if numbered else None,
        title_align="left", subtitle=figures, subtitle_align="right", border_style="dim",
        width=width,
    )  # fmt: skip
