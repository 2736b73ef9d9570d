"""Plots of a sweep (extra ``eval``: matplotlib): tasks side by side, and methods side by side."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError, missing
from .measure import Record
from .metrics import wilson
from .report import BASE, REFERENCE, Pooled, by_task, curves, fastest, pooled

AXES: dict[str, Callable[[Record], float]] = {
    "tokens per forward": lambda r: r.point[0],
    "positions computed per token": lambda r: sum(r.computed) / max(1, sum(r.tokens)),
    "seconds per prompt": lambda r: r.mean("seconds"),
}
MARKERS = "osD^vP*X<>"
MOST = len(MARKERS)  # lines that can be told apart in one panel
GREY = {"color": "0.75", "linewidth": 0.5, "zorder": 1}
NAN = math.nan
ACROSS = 6  # panels of a row where each method has its own


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def check_plots() -> None:
    """Raise `ConfigError` when plots cannot be drawn, before anything is measured for them."""
    if not can_plot():
        raise missing("matplotlib", "eval", ", or pass --no-plot")


def pareto(records: Sequence[Record], files: Sequence[Path]) -> None:
    """Accuracy against tokens per forward, computed positions and seconds: a panel per task and
    axis, a line per method with 95 % bands.  Of more methods than can be told apart the
    `named` ones have colours.  Writes every file, by its suffix (.svg, .png)."""
    tasks = by_task(records)
    if not tasks:
        raise ConfigError("there is nothing to plot: the sweep holds no records")
    with new_figure(3.2 * len(tasks) + 1.8, 2.6 * len(AXES) + 0.3, files) as figure:
        style = {
            method: {"color": f"C{i}", "marker": MARKERS[i],
                     "linestyle": ":" if " · " in method else "-"}
            for i, method in enumerate(named(records))
        }  # fmt: skip
        panels = figure.subplots(len(AXES), len(tasks), squeeze=False, sharey="col")
        for column, (task, result) in enumerate(tasks.items()):
            least = 100 * min(record.interval[0] for record in result)
            for row, (name, value) in enumerate(AXES.items()):
                axes = panels[row][column]
                _panel(axes, result, value, style)
                _dress(axes, name, "" if column else "% right", "" if row else task, least)
        handles = {
            label: line
            for line, label in zip(*panels[0][0].get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles, loc="center right", fontsize=7, frameon=False)
        figure.tight_layout(rect=(0, 0, 1 - 1.7 / figure.get_figwidth(), 1))


def multiples(
    records: Sequence[Record], files: Sequence[Path], methods: Sequence[str] | None = None,
    across: int = ACROSS,
) -> None:  # fmt: skip
    """Every method in a panel of its own, all tasks together, before the others in grey: accuracy
    with 95 % bands against tokens per forward.  ``methods``: those that get one (None: all);
    ``across``: panels of a row, two of which fit a phone.  Writes every file, by its suffix."""
    result = pooled([record for record in records if record.cache == BASE])
    lines: dict[str, list[Pooled]] = {}
    for (method, _), setting in sorted(result.items(), key=lambda item: item[1].rate):
        lines.setdefault(method, []).append(setting)
    if not lines:
        raise ConfigError("there is nothing to plot: no setting was measured on all tasks")
    every = list(lines.values())
    lines = {name: lines[name] for name in methods or lines if name in lines}
    least = min(_percent(setting)[1] for line in every for setting in line)
    across = min(across, len(lines))
    down = math.ceil(len(lines) / across)
    with new_figure(1.75 * across + 0.4, 1.5 * down + 0.4, files) as figure:
        panels = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
        for i, (method, line) in enumerate(lines.items()):
            axes = panels[i // across][i % across]
            axes.plot(*_broken(every), **GREY)
            x, (y, low, high) = [s.rate for s in line], zip(*map(_percent, line), strict=True)
            axes.fill_between(x, low, high, color="C0", alpha=0.25, linewidth=0)
            axes.plot(x, y, color="C0", marker="o", markersize=2.5, linewidth=1.2)
            last = i // across == down - 1 or i + across >= len(lines)
            _dress(axes, "tokens per forward" if last else "",
                   "" if i % across else "% right", method, least)  # fmt: skip
            axes.tick_params(labelbottom=last)
        for axes in panels.flat[len(lines) :]:
            axes.set_visible(False)
        figure.tight_layout()


def named(records: Sequence[Record]) -> list[str]:
    """The methods that a plot names: all if few, else the `fastest` and one token per step."""
    methods = list(dict.fromkeys(record.method for record in records))
    if len(methods) <= MOST:
        return methods
    best = [method for method in fastest(records)[1] if method != REFERENCE]
    return [*best[: MOST - 1], *(method for method in methods if method == REFERENCE)]


@contextmanager
def new_figure(width: float, height: float, files: Sequence[Path]) -> Iterator[Any]:
    """A figure that is written to every file when it is done; the same for the same records."""
    check_plots()
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "dllm", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(width, height))
        yield figure
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {})


def _panel(
    axes: Any, records: Sequence[Record], value: Callable[[Record], float],
    style: dict[str, dict[str, Any]],
) -> None:  # fmt: skip
    for method, members in curves(records).items():
        line = sorted(members, key=value)
        x, y = [value(record) for record in line], [100 * record.accuracy for record in line]
        if method not in style:
            axes.plot(x, y, marker=".", markersize=2, label="others", **GREY)
            continue
        low, high = ([100 * record.interval[end] for record in line] for end in (0, 1))
        below = [a - b for a, b in zip(y, low, strict=True)]
        above = [b - a for a, b in zip(y, high, strict=True)]
        colour = style[method]["color"]
        if len(line) == 1:  # a band has no width
            axes.errorbar(x, y, yerr=[below, above], color=colour, linewidth=0.8)
        axes.fill_between(x, low, high, color=colour, alpha=0.08, linewidth=0)
        axes.plot(x, y, label=method, linewidth=1, markersize=3, **style[method])


def _dress(axes: Any, below: str, left: str, above: str, least: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3), numticks=8))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(10 * math.floor(least / 10) - 2, 102)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_xlabel(below)
    axes.set_ylabel(left)
    axes.set_title(above, fontsize=8)


def _broken(lines: Sequence[Sequence[Pooled]]) -> tuple[list[float], list[float]]:
    """All lines as one with gaps, which is small in a file."""
    points = [p for line in lines for p in [*((s.rate, _percent(s)[0]) for s in line), (NAN, NAN)]]
    return [x for x, _ in points], [y for _, y in points]


def _percent(setting: Pooled) -> tuple[float, float, float]:
    """Percent right of all tasks together, with the 95 % interval."""
    right, n = sum(setting.right), len(setting.right)
    low, high = wilson(right, n)
    return 100 * right / n, 100 * low, 100 * high
