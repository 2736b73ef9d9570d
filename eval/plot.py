"""Pareto plots of a sweep (extra ``eval``: matplotlib)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .measure import Record
from .report import by_task, curves

AXES: dict[str, tuple[str, Callable[[Record], float]]] = {
    "tokens per forward": ("log", lambda r: r.point[0]),
    "positions computed per token": (
        "log", lambda r: sum(r.computed) / max(1, sum(r.tokens)),
    ),
    "seconds per prompt": ("log", lambda r: r.mean("seconds")),
}  # fmt: skip
MARKERS = "osD^vP*X<>ph"


def check_plots() -> None:
    """Raise `ConfigError` when plots cannot be drawn, before anything is measured for them."""
    if find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib: run `pip install dllm[eval]` or pass --no-plot")


def pareto(records: Sequence[Record], files: Sequence[Path]) -> None:
    """Accuracy against tokens per forward, computed positions and seconds: a panel per task and
    axis, a line per method with 95 % bands.  Writes every file, by its suffix (.svg, .png)."""
    check_plots()
    import matplotlib
    from matplotlib.figure import Figure

    tasks = by_task(records)
    if not tasks:
        raise ConfigError("there is nothing to plot: the sweep holds no records")
    style = _styles(records, matplotlib.colormaps["tab20"])
    with matplotlib.rc_context({"svg.hashsalt": "dllm", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(3.4 * len(tasks) + 1.6, 2.7 * len(AXES) + 0.4))
        panels = figure.subplots(len(AXES), len(tasks), squeeze=False, sharey="col")
        for column, (task, found) in enumerate(tasks.items()):
            for row, (name, (scale, value)) in enumerate(AXES.items()):
                axes = panels[row][column]
                _panel(axes, found, value, style)
                axes.set_xscale(scale)
                axes.set_xlabel(name)
                if not column:
                    axes.set_ylabel("% right")
                if not row:
                    axes.set_title(task)
        lines, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="center right", fontsize=7, frameon=False)
        figure.tight_layout(rect=(0, 0, 1 - 1.5 / figure.get_figwidth(), 1))
        for file in files:
            figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {})


def _styles(records: Sequence[Record], colours: Any) -> dict[str, dict[str, Any]]:
    methods = list(dict.fromkeys(record.method for record in records))
    return {
        method: {
            "color": colours(i % 20), "marker": MARKERS[i % len(MARKERS)],
            "linestyle": "-" if " · " not in method else ":",
        }
        for i, method in enumerate(methods)
    }  # fmt: skip


def _panel(
    axes: Any, records: Sequence[Record], value: Callable[[Record], float],
    style: dict[str, dict[str, Any]],
) -> None:  # fmt: skip
    for method, members in curves(records).items():
        line = sorted(members, key=value)
        x = [value(record) for record in line]
        bands = [record.interval for record in line]
        low, high = [100 * b[0] for b in bands], [100 * b[1] for b in bands]
        y = [100 * record.accuracy for record in line]
        axes.plot(x, y, label=method, linewidth=1, markersize=3, **style[method])
        axes.fill_between(x, low, high, color=style[method]["color"], alpha=0.06, linewidth=0)
    axes.set_ylim(-3, 103)
    axes.grid(alpha=0.25, linewidth=0.5)
