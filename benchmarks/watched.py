"""The moving picture of the README: a run of ``dllm generate --watch``."""

from __future__ import annotations

import html

import dllm
from dllm.cli.frames import COMMITTED, DRAFT, FRESH, MASK, Frame, Span, Speller, frame

WATCHED = "Tom has 23 apples. Tom buys 19 more. Then Tom loses 7. How many apples does Tom have?"
WATCHING = "llada(steps=16)"
COLUMNS, LINE, CHAR = 66, 22, 9.0  # characters per line, pixels
SECONDS, HOLD = 0.55, 3.5  # per step, and for the last one
COLOURS = {COMMITTED: "#d7dae0", FRESH: "#7ee787", DRAFT: "#d2a8a0", MASK: "#4b5263"}


def watched() -> str:
    """The run as SVG, which plays without scripts and has a background of its own."""
    model = dllm.load("nano")
    speller = Speller(model.tokenizer, model.facts.stop_token_ids)
    events = dllm.stream(model, WATCHED, sampler=WATCHING, max_new_tokens=64)
    frames = [frame(event, speller) for event in events]
    total = SECONDS * (len(frames) - 1) + HOLD
    width, height = round(32 + COLUMNS * CHAR), 7 * LINE + 16
    rules = "".join(
        f"@keyframes {name}{{0%{{opacity:1}}{100 * seconds / total:.3f}%{{opacity:0}}"
        "100%{opacity:0}}"
        for name, seconds in (("step", SECONDS), ("end", HOLD))
    )
    style = (
        f"text{{font:15px ui-monospace,Menlo,Consolas,monospace}}{rules}"
        f".frame{{opacity:0;animation:step {total:.2f}s step-end infinite}}"
        ".last{animation-name:end}"
    )
    shown = "".join(moment(i, one, i == len(frames) - 1) for i, one in enumerate(frames))
    command = html.escape(f'$ dllm generate "Tom has 23 apples. …" -s "{WATCHING}" --watch')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" aria-label="An answer is written in {len(frames)} steps">'
        f"<style>{style}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>'
        f'<text x="16" y="{LINE + 4}" fill="#8b949e">{command}</text>{shown}</svg>\n'
    )


def moment(number: int, shown: Frame, last: bool) -> str:
    """One frame, visible for its share of the time."""
    parts, y = [], 3 * LINE
    for row in broken(shown.spans):
        spans = "".join(
            f'<tspan fill="{COLOURS.get(kind, COLOURS[MASK])}">{html.escape(text)}</tspan>'
            for kind, text in row
        )
        parts.append(f'<text x="16" y="{y}" xml:space="preserve">{spans}</text>')
        y += LINE
    count = f"{shown.decided} of {shown.total} tokens · {shown.nfe} forward pass"
    count += "es" if shown.nfe != 1 else ""
    parts.append(f'<text x="16" y="{7 * LINE}" fill="#8b949e">{count}</text>')
    kind, delay = "frame last" if last else "frame", f"animation-delay:{number * SECONDS:.2f}s"
    return f'<g class="{kind}" style="{delay}">{"".join(parts)}</g>'


def broken(spans: tuple[Span, ...]) -> list[list[Span]]:
    """Spans broken into lines of `COLUMNS` characters."""
    rows: list[list[Span]] = [[]]
    room = COLUMNS
    for kind, text in spans:
        while text:
            piece, text = text[:room], text[room:]
            rows[-1].append(Span(kind, piece))
            room -= len(piece)
            if not room:
                rows.append([])
                room = COLUMNS
    return rows
