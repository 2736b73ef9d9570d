"""Draw docs/watch.svg: a real run of ``dllm generate --watch``, as an animated picture.

    python benchmarks/watch_picture.py

One prompt, `nano`, the frames that a terminal would show.  The picture has a background of its own,
so that it reads the same on light and dark pages, and plays without scripts.
"""

from __future__ import annotations

import argparse
import html
from pathlib import Path

import dllm
from dllm.cli.frames import COMMITTED, DRAFT, FRESH, MASK, Frame, Span, Speller, frame

PROMPT = "Tom has 23 apples. Tom buys 19 more. Then Tom loses 7. How many apples does Tom have?"
SAMPLER = "llada(steps=16)"
COLUMNS, LINE, CHAR = 66, 22, 9.0  # characters per line, pixels
SECONDS, HOLD = 0.55, 3.5  # per step, and for the last one
COLOURS = {COMMITTED: "#d7dae0", FRESH: "#7ee787", DRAFT: "#d2a8a0", MASK: "#4b5263"}
ROOT = Path(__file__).parents[1]


def run() -> list[Frame]:
    """The frames of one generation."""
    model = dllm.load("nano")
    assert model.tokenizer is not None
    speller = Speller(model.tokenizer, model.facts.stop_token_ids)
    steps = dllm.stream(model, PROMPT, sampler=SAMPLER, max_new_tokens=64)
    return [frame(event, speller) for event in steps]


def lines(spans: tuple[Span, ...]) -> list[list[Span]]:
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


def group(number: int, shown: Frame, last: bool) -> str:
    """One frame: its text, visible for its share of the time."""
    parts, y = [], 3 * LINE
    for row in lines(shown.spans):
        spans = "".join(
            f'<tspan fill="{COLOURS.get(kind, COLOURS[MASK])}">{html.escape(text)}</tspan>'
            for kind, text in row
        )
        parts.append(f'<text x="16" y="{y}" xml:space="preserve">{spans}</text>')
        y += LINE
    count = f"{shown.decided} of {shown.total} tokens · {shown.nfe} forward"
    count += "s" if shown.nfe != 1 else ""
    parts.append(f'<text x="16" y="{7 * LINE}" fill="#8b949e">{count}</text>')
    kind = "frame last" if last else "frame"
    delay = f"animation-delay:{number * SECONDS:.2f}s"
    return f'<g class="{kind}" style="{delay}">{"".join(parts)}</g>'


def picture(frames: list[Frame]) -> str:
    """The whole run as SVG."""
    total = SECONDS * (len(frames) - 1) + HOLD
    width, height = round(32 + COLUMNS * CHAR), 7 * LINE + 16
    shares = {"step": 100 * SECONDS / total, "end": 100 * HOLD / total}
    rules = "".join(
        f"@keyframes {name}{{0%{{opacity:1}}{share:.3f}%{{opacity:0}}100%{{opacity:0}}}}"
        for name, share in shares.items()
    )
    style = (
        f"text{{font:15px ui-monospace,Menlo,Consolas,monospace}}{rules}"
        f".frame{{opacity:0;animation:step {total:.2f}s step-end infinite}}"
        ".last{animation-name:end}"
    )
    groups = "".join(group(i, shown, i == len(frames) - 1) for i, shown in enumerate(frames))
    command = html.escape(f'$ dllm generate "Tom has 23 apples. …" -s "{SAMPLER}" --watch')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" aria-label="An answer is written in {len(frames)} steps">'
        f"<style>{style}</style>"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>'
        f'<text x="16" y="{LINE + 4}" fill="#8b949e">{command}</text>{groups}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "watch.svg")
    options = parser.parse_args()
    frames = run()
    options.output.write_text(picture(frames), encoding="utf-8")
    print(f"{options.output}: {len(frames)} frames")


if __name__ == "__main__":
    main()
