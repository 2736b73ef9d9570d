"""What happened at each step of one row, as plain data: written to JSON, replayed, drawn."""

import html
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.canvas import Canvas, moved

if TYPE_CHECKING:
    from ..engine import Step

FORMAT = 1


@dataclass
class TraceStep:
    """One forward of one row.

    ``commits``: [position, token, log-probability]; ``remasked``: positions; ``computed``: the
    number of positions fed to the model per branch, ``compute`` and ``read`` the positions as
    [low, high) runs; ``refresh``: whether the cache computed all anew; ``forced``: whether no
    selector chose; ``drafts``: [position, proposed token] of what stayed undecided; ``bits``:
    information committed, the sum of -log2 p; ``explored``: branches fed beyond the one kept;
    ``candidates``: [position, [[token, log-probability], ...]] when they were recorded;
    ``edits``: [at, removed, added, token] changes of the length that followed, in turn (see
    `dllm.core.canvas.Edit`), in whose coordinates all other positions of the step are not yet;
    ``probe``: whether the step only looked for the length.
    """

    step: int
    window: tuple[int, int]
    commits: list[tuple[int, int, float]]
    remasked: list[int]
    computed: int
    compute: list[tuple[int, int]]
    read: list[tuple[int, int]] | None
    refresh: bool
    forced: bool
    drafts: list[tuple[int, int]]
    bits: float = 0.0
    explored: int = 0
    candidates: list[tuple[int, list[tuple[int, float]]]] = field(default_factory=list)
    edits: list[tuple[int, int, int, int | None]] = field(default_factory=list)
    probe: bool = False


@dataclass
class Trace:
    """The steps of one row.  ``pieces`` maps the ids that occur to their text; ``given`` are the
    positions of fixed text, the prompt and what stands around holes, as [low, high) runs;
    ``computed``: positions that all steps fed, in all branches, guided or not."""

    prompt: list[int]
    length: int
    region: tuple[int, int]
    sampler: str
    cache: str
    model: str
    steps: list[TraceStep] = field(default_factory=list)
    final: list[int] = field(default_factory=list)
    pieces: dict[int, str] = field(default_factory=dict)
    given: list[tuple[int, int]] = field(default_factory=list)
    computed: int = 0

    @classmethod
    def start(cls, canvas: Canvas, sampler: str, cache: str, model: str) -> "Trace":
        """An empty trace of a canvas that has not been touched."""
        prompt = canvas.tokens[: canvas.prompt_length].tolist()
        region, given = (canvas.start, canvas.end), runs((~canvas.masked).nonzero()[0].tolist())
        return cls(prompt, len(canvas.tokens), region, sampler, cache, model, given=given)

    def add(self, step: "Step") -> None:
        """Record one step."""
        p, d, canvas = step.prediction, step.decision, step.canvas
        taken = set(d.committed.tolist())
        commits = zip(d.committed.tolist(), d.tokens.tolist(), d.logprobs.tolist(), strict=True)
        entry = TraceStep(
            step=step.number, window=step.window,
            commits=sorted((i, t, round(q, 6)) for i, t, q in commits),
            remasked=d.remasked.tolist(),
            computed=len(step.plan.compute), compute=runs(step.plan.compute.tolist()),
            read=None if step.plan.read is None else runs(step.plan.read.tolist()),
            refresh=step.plan.refresh, forced=d.forced,
            drafts=[
                (i, t) for i, t in step.proposals.items()
                if i not in taken and (at := moved(i, d.edits)) is not None and canvas.masked[at]
            ],
            bits=round(d.bits, 6), explored=d.explored, probe=d.probe,
            edits=[(edit.at, edit.removed, edit.added, edit.token) for edit in d.edits],
        )  # fmt: skip
        if p.top_token is not None and p.top_logprob is not None:
            entry.candidates = [  # what was banned or filtered out is no candidate
                (i, [(t, round(q, 6)) for t, q in zip(ts, qs, strict=True) if math.isfinite(q)])
                for i, ts, qs in zip(
                    p.positions.tolist(), p.top_token.tolist(), p.top_logprob.tolist(), strict=True
                )
            ]
        self.steps.append(entry)
        self.computed += step.positions

    def close(self, canvas: Canvas, decode: Any = None) -> None:
        """Record the final canvas and, given ``decode``, the text of every id that occurs."""
        self.final = canvas.tokens.tolist()
        if decode is not None:
            ids = {*self.final}
            for step in self.steps:
                ids |= {t for _, t, _ in step.commits} | {t for _, t in step.drafts}
                ids |= {t for _, result in step.candidates for t, _ in result}
            self.pieces = {i: decode([i]) for i in sorted(ids)}

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain data, such as strict JSON takes."""
        pieces = {str(token): piece for token, piece in self.pieces.items()}
        return {"format": FORMAT, **asdict(self), "pieces": pieces}

    def to_json(self) -> str:
        """Strict JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def _repr_html_(self) -> str:
        """The answer in a notebook: a cell per position, darker the later it was decided."""
        when = {i: k for k, step in enumerate(self.steps) for i, _, _ in step.commits}
        given = {i for low, high in self.given for i in range(max(low, len(self.prompt)), high)}
        last = max(len(self.steps) - 1, 1)
        cells = []
        for i in sorted(when.keys() | given):
            token = self.final[i] if i < len(self.final) else -1
            text = self.pieces.get(token, f"[{token}]")
            decided = i in when
            note = f"step {when[i] + 1}" if decided else "given"
            cells.append(Cell(text, when[i] / last if decided else None, note))
        return canvas_html(
            cells,
            f"{self.model} · sampler {self.sampler} · cache {self.cache} · forwards "
            f"{len(self.steps)} · positions computed {self.computed} · darker is later",
        )

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


@dataclass(frozen=True)
class Cell:
    """One position in a notebook.  ``when``: from 0, decided first, to 1, last; None for what is
    given or undecided.  ``note`` appears where the mouse rests."""

    text: str
    when: float | None = None
    note: str = "given"
    draft: bool = False


LONG_RUN = 4  # equal cells in a row, such as the end of a text, that are drawn as one


def canvas_html(cells: Sequence[Cell], caption: str) -> str:
    """A canvas as HTML without a style sheet: cells bring colours for light and dark notebooks."""
    spans = []
    for cell, run in groupby(cells):
        count = len(list(run))
        text = html.escape(cell.text.replace("\n", "⏎"))
        drawn = [f"{text} ×{count}"] if count >= LONG_RUN else [text] * count
        look = "background:#d8d8d8;color:#111"
        if cell.when is not None:
            look = f"background:hsl(212 60% {93 - 35 * cell.when:.0f}%);color:#111"
        if cell.draft:
            look += ";font-style:italic;opacity:.6"
        look += ";border-radius:3px;padding:0 .25em;margin:1px;display:inline-block;white-space:pre"
        note = html.escape(cell.note)
        spans += [f"<span title='{note}' style='{look}'>{shown}</span>" for shown in drawn]
    body = "".join(spans)
    return (
        f"<div style='font-family:monospace;line-height:1.7'>{body}</div>"
        f"<small>{html.escape(caption)}</small>"
    )


def runs(positions: list[int]) -> list[tuple[int, int]]:
    """Ascending positions as [low, high) runs."""
    result: list[tuple[int, int]] = []
    for position in positions:
        if result and result[-1][1] == position:
            result[-1] = (result[-1][0], position + 1)
        else:
            result.append((position, position + 1))
    return result
