"""``dllm bench``: samplers, caches and their parameters on tasks, as curves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.errors import ConfigError, missing
from .options import MEASURING, OUTPUT, Ways, option, takes
from .output import check_output, interactive, note, stderr, waiting

if TYPE_CHECKING:
    from ..eval.measure import Cell, Record
    from ..eval.sweep import Sweep


@dataclass(frozen=True, kw_only=True)
class Bench(Ways):
    """Options of ``dllm bench``."""

    tasks: list[str] | None = option(
        None, "Tasks: names or .jsonl files, separated by commas or repeated.", MEASURING,
        "--tasks", "--task",
    )  # fmt: skip
    curve: list[str] | None = option(
        None, "Sampler to run at several values of its main parameter, or 'all'; repeatable.",
        MEASURING,
    )  # fmt: skip
    preset: str | None = option(None, "Named sweep: readme or quick.", MEASURING)
    examples: int | None = option(None, "Examples per task, default 100.", MEASURING, min=1)
    rows: int | None = option(None, "Sequences decoded at a time, default 32.", MEASURING, min=1)
    seed: int | None = option(None, "Random seed of the examples, default 0.", MEASURING, min=0)
    output: Path = option(Path("runs/bench"), "Folder of the results, default runs/bench.", OUTPUT)
    plot: bool | None = option(
        None, "Draw pareto and methods, as .svg and .png; default: where matplotlib is installed.",
        OUTPUT, "--plot/--no-plot",
    )  # fmt: skip


@takes(Bench)
def bench(*, options: Bench) -> None:
    """Measure accuracy, forwards, positions and seconds of samplers and caches.

    A sweep that was stopped goes on where it was; --preset quick takes seconds.
    """
    with waiting("loading dllm"):
        from ..eval import report
        from ..eval.plot import can_plot, check_plots, multiples, pareto
        from ..eval.problems import find_task
        from ..eval.sweep import Journal, distinct, run

    sweeps = _sweeps(options)
    cells = distinct(cell for sweep in sweeps for cell in sweep.cells())
    refused = {label: why for sweep in sweeps for label, why in sweep.refused().items()}
    for task in dict.fromkeys(cell.task for cell in cells):
        find_task(task)  # a mistake in one is reported at once
    if options.plot:
        check_plots()
    journal = Journal(options.output / "results.jsonl")
    options.output.mkdir(parents=True, exist_ok=True)
    check_output(journal.path)
    model = options.load()
    with SweepProgress() as teller:
        records = run(model, cells, journal, teller.cell, refused, teller.answered)
    if not records:
        raise ConfigError(next(iter(refused.values()), "there is nothing to measure"))
    mixed = journal.mixed(records)
    if mixed:
        parts = (f"{name} {' and '.join(map(str, result))}" for name, result in mixed.items())
        note(f"do not compare seconds, {journal.path} mixes machines: {', '.join(parts)}")
    for label, reason in refused.items():
        note(f"left out {label}: {reason}")
    texts = {
        "table.md": report.full_table(records),
        "caches.md": report.cache_table(records),
        "fastest.md": report.fastest_table(records),
    }
    for name, text in texts.items():
        (options.output / name).write_text(text + "\n", encoding="utf-8")
    if options.plot or (options.plot is None and can_plot()):
        for name, draw in (("pareto", pareto), ("methods", multiples)):
            draw(records, [options.output / f"{name}.{kind}" for kind in ("svg", "png")])
    elif options.plot is None:
        note(f"no plots: {missing('matplotlib', 'eval')}")
    print(texts["table.md"])
    note(f"{len(records)} records in {options.output}")


def _sweeps(options: Bench) -> list[Sweep]:
    from ..eval.curves import samplers_with_curves
    from ..eval.sweep import Sweep, preset

    changes = options.given("examples", "rows", "seed")
    parts = (name.strip() for given in options.tasks or () for name in given.split(","))
    tasks = list(dict.fromkeys(name for name in parts if name))
    canvas = options.given("max_new_tokens", "block_length")
    if options.preset is not None:
        if options.sampler or options.curve or options.cache or canvas:
            raise ConfigError("a preset says what to measure: drop --preset or the other options")
        return [replace(s, **changes, tasks=tasks or s.tasks) for s in preset(options.preset)]
    curves = samplers_with_curves() if "all" in (options.curve or ()) else options.curve or []
    samplers = options.sampler or ([] if curves else ["threshold"])
    arguments = tuple(sorted(({"max_new_tokens": 64} | canvas).items()))
    return [
        Sweep(tasks, samplers, curves, options.cache or ["none"], arguments=arguments, **changes)
    ]


class SweepProgress:
    """One line per cell; on a terminal also how far the present one is."""

    def __init__(self) -> None:
        self._status = stderr().status("") if interactive() else None
        self._where = ""
        self.left = 0

    def cell(self, done: int, total: int, cell: Cell, record: Record | None) -> None:
        """Before and after each cell."""
        self.left = total - done
        self._where = f"{done}/{total} {cell.task} {cell.setting.label}"
        if record is None:
            self.answered(cell, 0)
            return
        note(
            f"{done}/{total} {cell.task:12} {cell.setting.label:32} "
            f"{100 * record.accuracy:5.1f} % "
            f"{record.point[0]:6.2f} tokens per forward {record.seconds:7.2f} s"
        )

    def answered(self, cell: Cell, count: int) -> None:
        """So many of the present cell's examples have their answer."""
        if self._status is not None:
            self._status.update(f"{self._where}: {count} of {cell.examples} answered")

    def __enter__(self) -> SweepProgress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._status is not None:
            self._status.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            left = "1 cell" if self.left == 1 else f"{self.left} cells"
            note(f"stopped with {left} left: the same command goes on where it was")
